"""The launches of the scan for CoSENT (scan.py)."""

from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.scan import carries_kernel, scan_kernel, totals_kernel

PART = 1024  # logits of a program
CARRIES = 512  # parts whose totals are added up at a time


def running_sums(logits):
    """Running log-sum-exps (2, M), float64, of logits (M,).

    Row 0 runs forward over the logits, row 1 backward over the negated logits.
    """
    count = logits.shape[0]
    parts = cdiv(count, PART)
    tops, sums, carry_tops, carry_sums = (logits.new_empty(2, parts) for _ in range(4))
    top, total = logits.new_empty(2, count), logits.new_empty(2, count)
    grid, device = (parts, 2), logits.device
    launch(totals_kernel, grid, device, logits, tops, sums, count, BLOCK=PART)
    launch(carries_kernel, (2,), device, tops, sums, carry_tops, carry_sums, parts, BLOCK=CARRIES)
    launch(scan_kernel, grid, device, logits, carry_tops, carry_sums, top, total, count, BLOCK=PART)
    return total.double().log_().add_(top)
