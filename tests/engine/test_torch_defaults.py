"""A loss is the same whatever torch's default dtype and device are."""

import contextlib

import pytest
import torch

import fastsim
from tests.cases import CASES, call, inputs, on_backend

BACKENDS = tuple(fastsim.backends())
SHAPES = {"small": (5, 7, 4), "panels": (67, 75, 34)}


@contextlib.contextmanager
def default(value):
    """The block under a default dtype or device."""
    if isinstance(value, torch.dtype):
        before, chosen = torch.get_default_dtype(), torch.set_default_dtype
    else:
        before, chosen = None, torch.set_default_device
    chosen(value)
    try:
        yield
    finally:
        chosen(before)


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_defaults_change_nothing(case, backend, value, small_panels, usable):
    usable(backend)
    for shape in SHAPES.values():
        if shape[0] * shape[1] > case.largest:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            tensors, others, options = inputs(case, shape, dtype, seed=71)
            options |= on_backend(case, backend)

            def under_default(*given, **options):
                with default(value):
                    return case.loss(*given, **options)

            with default("cpu"):  # of the sum and the backward pass
                wanted, wanted_grads = call(case.loss, tensors, others, options)
                found, grads = call(under_default, tensors, others, options)
            assert torch.equal(found, wanted)
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_defaults_change_no_search(backend, value, usable):
    usable(backend)
    x, y = torch.randn(9, 6), torch.randn(23, 6)
    for search in (
        lambda: fastsim.top_k(x, y, 5, backend=backend),
        lambda: fastsim.closest_negative(x, y, backend=backend),
        lambda: fastsim.mine_hard_negatives(x, y, count=2, sample=True, backend=backend),
        lambda: (fastsim.max_sim(x[:, None], y[:, None], backend=backend),),
    ):
        wanted = search()
        with default(value):
            found = search()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
