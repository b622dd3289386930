"""Benchmarks: results go to bench/results/<device>/ as JSON lines, figures and tables come from them."""
