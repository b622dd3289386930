"""Cosines of paired rows and their gradients: layouts, widths, one side alone, the edges."""

import pytest
import torch
from torch.library import opcheck

import fastsim
from fastsim import scores
from tests.cases import call
from tests.measure import assert_close, conditioning
from tests.oracles import cosines

BACKENDS = tuple(fastsim.backends())
COMPILED = tuple(name for name in BACKENDS if name != "eager")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# More than a chunk of the CPU kernels, and no multiple of a vector; few and many rows a thread.
SHAPES = ((1, 1), (3, 2051), (300, 131))
LAYOUTS = {
    "rows": lambda n, d: torch.randn(n, d),
    "columns": lambda n, d: torch.randn(d, n).T,
    "steps": lambda n, d: torch.randn(2 * n, 2 * d)[::2, 1::2],
    "one row": lambda n, d: torch.randn(1, d).expand(n, d),
}


def paired(x, y):
    return torch.stack([cosines(a[None], b[None])[0, 0] for a, b in zip(x, y, strict=True)])


def gradients(function, x, y):
    """Value, dL/dx, dL/dy with leaves of the layout they came in."""
    leaves = [t.detach().requires_grad_() for t in (x, y)]
    value = function(*leaves)
    weights = torch.arange(1.0, len(value) + 1, dtype=value.dtype)
    return value.detach(), *torch.autograd.grad(value @ weights, leaves)


def terms(x, y):
    """The size of what makes up dL/dx, (v - c u) / |x| with weights 1 to N: it may cancel."""
    unit_x, unit_y = (t / t.norm(dim=1, keepdim=True) for t in (x, y))
    weights = torch.arange(1.0, len(x) + 1) / x.norm(dim=1)
    return ((unit_x.abs() + unit_y.abs()) * weights[:, None]).max().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(backend, dtype, layout, shape, usable):
    usable(backend)
    x, y = LAYOUTS[layout](*shape).to(dtype), torch.randn(shape).to(dtype)
    compute = torch.promote_types(dtype, torch.float32)
    got = gradients(lambda *t: fastsim.paired_cosine_similarity(*t, backend=backend), x, y)
    dense = gradients(
        lambda *t: torch.nn.functional.cosine_similarity(*t), x.to(compute), y.to(compute)
    )
    truth = gradients(paired, x.double(), y.double())
    assert [t.dtype for t in got] == [compute, dtype, dtype]
    wide = x.double(), y.double()
    # In float64 the oracle's sum is rounded as well.
    summed = paired(*(t.abs() for t in wide)).max().item() if dtype == torch.float64 else 0.0
    sizes = (summed, terms(*wide), terms(*wide[::-1]))
    # Few values are few draws of rounding, so what rounding the terms does counts as well.
    moved = conditioning(lambda t: gradients(torch.nn.functional.cosine_similarity, *t), wide)
    names = ("value", "dx", "dy")
    rest = zip(sizes, moved, strict=True)
    for name, mine, exact, other, (size, move) in zip(names, got, truth, dense, rest, strict=True):
        assert_close(name, mine, exact, other, mine.dtype, size, move * torch.finfo(compute).eps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_side_alone(backend, usable):
    usable(backend)
    x, y = torch.randn(7, 12), torch.randn(7, 12)
    both = call(fastsim.paired_cosine_similarity, [x, y], [], {"backend": backend})[1]
    for side in (0, 1):
        leaves = [x.clone(), y.clone()]
        leaves[side].requires_grad_()
        value = fastsim.paired_cosine_similarity(*leaves, backend=backend)
        (value * torch.arange(1.0, 8)).sum().backward()
        assert torch.equal(leaves[side].grad, both[side])
        assert leaves[1 - side].grad is None
    alone = fastsim.paired_cosine_similarity(x, y, backend=backend)
    assert torch.equal(alone, value)
    assert not alone.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows(backend, usable):
    usable(backend)
    x, y = torch.randn(5, 9), torch.randn(5, 9)
    x[1], y[2], x[3], y[3] = 0, 0, 0, 0
    x[4] *= 1e-42  # shorter than the smallest normal number
    options = {"backend": backend}
    value, grads = call(fastsim.paired_cosine_similarity, [x, y], [], options)
    assert value[0] != 0
    assert (value[1:] == 0).all()
    for grad in grads:
        assert (grad[0] != 0).any()
        assert (grad[1:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("other", [0.0, 1.0])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_show_in_their_row_alone(backend, side, other, bad, usable):
    usable(backend)
    tensors = [torch.randn(4, 9), torch.randn(4, 9)]
    tensors[side][2, 5] = bad
    tensors[1 - side][2, 5] = other
    value, grads = call(fastsim.paired_cosine_similarity, tensors, [], {"backend": backend})
    assert value.isfinite().tolist() == [True, True, False, True]
    assert not grads[side][2].isfinite().any()
    assert all(grad[[0, 1, 3]].isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_at_the_ends_of_the_range(backend, size, usable):
    usable(backend)
    x, y = torch.randn(6, 11), torch.randn(6, 11)
    truth = gradients(paired, x.double() * size, y.double() * size)
    got = gradients(
        lambda *t: fastsim.paired_cosine_similarity(*t, backend=backend), x * size, y * size
    )
    plain = gradients(lambda *t: torch.nn.functional.cosine_similarity(*t), x, y)
    for name, mine, exact, other, unit in zip(
        ("value", "dx", "dy"), got, truth, plain, (1, size, size), strict=True
    ):
        # The formula in the middle of the range: at its ends torch's own squares leave it.
        assert_close(name, mine.double() * unit, exact * unit, other, torch.float32)


@pytest.mark.parametrize("wants", [[True, True], [True, False], [False, True], [False, False]])
@pytest.mark.parametrize("backend", COMPILED)
def test_opcheck(backend, wants, usable):
    usable(backend)
    x, y = torch.randn(5, 12)[:, ::2], torch.randn(5, 6)
    opcheck(scores._paired_cosines.operator, (x, y, backend))
    cosine, inverse = scores._paired_cosines(x, y, backend)
    arguments = (torch.randn(5), x, y, cosine, inverse, wants, backend)
    opcheck(scores._paired_cosines_backward.operator, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_with_one_side_frozen(backend, usable):
    usable(backend)
    torch._dynamo.reset()
    compiled = torch.compile(fastsim.paired_cosine_similarity, fullgraph=True, backend="aot_eager")
    x, y = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
    got = compiled(x, y, backend=backend)
    wanted = fastsim.paired_cosine_similarity(x, y, backend=backend)
    torch.testing.assert_close(got, wanted)
    grads = (torch.autograd.grad(value.square().sum(), x)[0] for value in (got, wanted))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", COMPILED)
def test_the_passes_over_unit_rows_agree(backend, usable, monkeypatch):
    """What a backend without kernels of its own for paired rows does."""
    usable(backend)
    from fastsim.backends import get
    from fastsim.backends.base import Backend

    x, y = torch.randn(9, 14).bfloat16(), torch.randn(9, 14).bfloat16()
    y[4] = 0
    own = call(fastsim.paired_cosine_similarity, [x, y], [], {"backend": backend})
    for name in ("paired_cosines", "paired_cosines_backward"):
        monkeypatch.setattr(type(get(backend)), name, getattr(Backend, name))
    value, grads = call(fastsim.paired_cosine_similarity, [x, y], [], {"backend": backend})
    torch.testing.assert_close(value, own[0])
    for grad, other in zip(grads, own[1], strict=True):
        torch.testing.assert_close(grad, other)
