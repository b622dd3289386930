"""The derived tolerance: at most twice the error of the same-dtype dense torch formula."""

import torch


def assert_close(name, got, truth, dense, rounding, size=0.0):
    """max |got - truth| <= 2 (max |dense - truth| + rounding of max |truth|), NaN refused.

    truth: float64. dense: the plain formula in the same dtype. rounding: the dtype in which the
    result is returned, whose spacing is eps |truth|, or that of its subnormal numbers near 0.
    size: of the terms whose sum the result is, where they may cancel.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(truth.shape)}"
    got, dense = got.double(), dense.double()
    assert got.isfinite().all(), f"{name}: not finite"
    error = (got - truth).abs().max().item()
    theirs = (dense - truth).abs().max().item()
    kind = torch.finfo(rounding)
    spacing = kind.eps * max(truth.abs().max().item(), size, kind.tiny)
    allowed = 2 * (theirs + spacing)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
