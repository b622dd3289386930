"""The derived tolerance: at most twice what the same-dtype dense formula errs and its terms round.

The dense formula is one draw of rounding, and now and then a lucky one. So what one unit in the
last place of every input does to the truth counts as well (its conditioning): it knows of terms
that cancel, of a temperature that multiplies errors, and of the rounding of the scores.

The dense formula is often fastsim's own, and shares with the code that is tested what comes before
any kernel. So it may lose three quarters of its digits, more than rounding takes where nothing is
divided by what cancels; what loses more is wrong. Where the truth is 0, its terms are about 1.
"""

import torch

from tests.seeds import fresh

STEP = 1e-7  # relative change of the inputs: far above the rounding of float64, far below kinks
DRAWS = 4
ROUNDINGS = 3  # of a score: the two norms and the product


def assert_close(name, got, truth, dense, rounding, size=0.0, moved=0.0, *, independent=False):
    """max |got - truth| <= 2 (max |dense - truth| + rounding of max |truth| + moved), NaN refused.

    truth: float64. dense: the plain formula in the same dtype. rounding: the dtype in which the
    result is returned, whose spacing is eps |truth|, or that of its subnormal numbers near 0.
    size: of the terms whose sum the result is, where they may cancel. moved: by how much the
    rounding of the inputs moves the truth (`conditioning` times eps of the type computed in);
    it counts once for every rounding of a score. independent: whether the dense formula shares no
    code with fastsim; it may then err by any amount.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(truth.shape)}"
    quarter = max(torch.finfo(dtype).eps for dtype in (dense.dtype, rounding)) ** 0.25
    got, dense = got.double(), dense.double()
    assert got.isfinite().all(), f"{name}: not finite"
    error = (got - truth).abs().max().item()
    theirs = (dense - truth).abs().max().item()
    kind = torch.finfo(rounding)
    size = max(truth.abs().max().item(), size, kind.tiny)
    spacing = kind.eps * size
    allowed = 2 * (theirs + spacing + ROUNDINGS * moved)
    if rounding == torch.float64:
        allowed *= 2  # the truth is no wider, and has errors of its own
    assert allowed < float("inf"), f"{name}: the dense formula is not finite"
    believed = quarter * max(size, quarter) + moved / quarter**2
    assert independent or theirs <= believed, f"{name}: the dense formula errs by {theirs:.3g}"
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def conditioning(function, tensors, seed=0):
    """How much each result of function(tensors) moves by a relative change of 1 of the inputs.

    tensors: float64, or None. function: returns a list of float64 results. A random change of
    every number, the worst of a few draws. Returns one number for each result.
    """
    generator = fresh(seed)
    before = function(tensors)
    most = [0.0] * len(before)
    for _ in range(DRAWS):
        moved = [t if t is None else t * (1 + STEP * _signs(t.shape, generator)) for t in tensors]
        for place, (one, other) in enumerate(zip(function(moved), before, strict=True)):
            most[place] = max(most[place], (one - other).abs().max().item() / STEP)
    return most


def _signs(shape, generator):
    return 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
