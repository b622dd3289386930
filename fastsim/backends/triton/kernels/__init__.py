"""The Triton kernels: rows, the tile with its epilogues, merges of partials, the CoSENT scan.

Importing a module of this package imports triton; fastsim/backends/triton/backend.py does so on
first use.
"""
