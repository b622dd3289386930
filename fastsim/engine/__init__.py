"""The engine: a loss over all scores and its gradient, one panel at a time (see autograd.py)."""
