"""Benchmarks: time, memory and exactness of the losses beside what a user would pick instead.

cases.py what is measured, baselines/ against what, run.py in which order; timing.py, memory.py and
accuracy.py how; results.py and compare.py what becomes of it; model.py what it should have taken.
"""
