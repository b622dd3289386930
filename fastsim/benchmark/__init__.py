"""Benchmarks: time, memory and accuracy of the losses, beside what a user would pick instead.

cases.py lists the losses that are measured, baselines/ the implementations; run.py orders the
measurements. timing.py, memory.py and accuracy.py measure. results.py, measurements.py, tables.py
and compare.py store, look up, show and compare results. model.py predicts times.
"""
