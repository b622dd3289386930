"""The compiled CUDA backend."""
