"""The engine: a loss over all scores of x and y, and its gradient, without the matrix of scores.

What the passes are, and what a band, a block, a panel and a tile are: fastsim/README.md,
"The engine".
"""
