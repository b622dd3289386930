"""Benchmarks: results are JSON lines under bench/results/<device>/; tables come from them."""
