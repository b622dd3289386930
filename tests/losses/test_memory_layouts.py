"""How inputs lie in memory, what fresh memory holds, who wants a gradient: none changes a value."""

import pytest
import torch

import fastsim
from tests.cases import (
    BY_NAME,
    CASES,
    TWO_SIDED,
    WITH_ROWS,
    call_case,
    inputs,
    on_backend,
)
from tests.losses.rounding import largest_exponent, moves
from tests.measure import ROUNDINGS

BACKENDS = tuple(fastsim.backends())
TILES = [case for case in CASES if case.tile]
SHAPE = (6, 9, 4)


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack([t, t], 2)[:, :, 0],
    "rows of a larger tensor": lambda t: torch.cat([t, t])[::2][: t.shape[0]],
}


def laid_out(value, layout):
    """Tensors in arguments, ids and targets, in a layout; of a vector every second number."""
    if isinstance(value, dict):
        return {name: laid_out(one, layout) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(laid_out(one, layout) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return torch.stack([value, value], 1)[:, 0] if value.dim() == 1 else LAYOUTS[layout](value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WITH_ROWS, ids=repr)
def test_layouts(case, backend, layout, usable):
    usable(backend)
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=4)
    options |= on_backend(case, backend)
    others, options = laid_out(others, layout), laid_out(options, layout)
    laid = [t if t is None else LAYOUTS[layout](t).detach().requires_grad_() for t in tensors]
    plain = [t if t is None else t.detach().contiguous().requires_grad_() for t in laid]
    for one, other in zip(laid, plain, strict=True):
        assert one is None or torch.equal(one, other)
    found = []
    for side in (laid, plain):
        value = case.loss(*side, *others, **options)
        found.append([value, *torch.autograd.grad(value, [t for t in side if t is not None])])
    eps, moved = torch.finfo(torch.float32).eps, moves(case.name, SHAPE, 4, None)
    sizes = [wanted.abs().max().item() for wanted in found[1]]
    rows = {"reduction": "none"} if case.reduces else {}
    with torch.no_grad():
        losses = case.loss(*plain, *others, **options, **rows)
    # Where one term has all the weight, the rounding of the inputs says nothing of the weight's.
    exponent = largest_exponent(case, tensors, options, losses)
    sizes[1:] = [size * (1 + exponent) for size in sizes[1:]]
    # Another layout may round otherwise, and so may either of the two.
    for one, other, size, move in zip(*found, sizes, moved, strict=True):
        assert (one - other).abs().max() <= 4 * eps * (size + ROUNDINGS * move)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_expanded_rows(case, backend, usable):
    usable(backend)
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=5)
    tensors[0] = tensors[0][:1].expand(6, 4)
    value, grads = call_case(case, tensors, others, options, backend)
    copied, wanted = call_case(
        case, [t if t is None else t.contiguous() for t in tensors], others, options, backend
    )
    assert torch.equal(value, copied)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["info_nce", "info_nce-symmetric", "siglip", "full_triplet"])
def test_the_same_tensor_on_both_sides(name, backend, usable):
    usable(backend)
    case = BY_NAME[name]
    (x, _), others, options = inputs(case, (7, 7, 5), torch.float64, seed=6)
    x = x.requires_grad_()
    one = case.loss(x, x, *others, **options, backend=backend)
    (grad,) = torch.autograd.grad(one, x)
    left, right = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    two = case.loss(left, right, *others, **options, backend=backend)
    both = torch.autograd.grad(two, (left, right))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(grad, both[0] + both[1])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TWO_SIDED, ids=repr)
def test_one_side_wants_a_gradient(case, backend, side, usable):
    usable(backend)
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=7)
    _, grads = call_case(case, tensors, others, options, backend)
    options |= on_backend(case, backend)
    tensors[side].requires_grad_()
    value = case.loss(*tensors, *others, **options)
    (grad,) = torch.autograd.grad(value, tensors[side])
    assert torch.equal(grad, grads[side])


@pytest.fixture
def nan_in_fresh_memory():
    """What is allocated holds NaN, or the largest of an integer dtype, until it is written."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_nothing_is_read_before_it_is_written(case, backend, usable, nan_in_fresh_memory):
    usable(backend)
    shape = (130, 140, 34) if case.largest >= 10_000 else (15, 20, 34)
    tensors, others, options = inputs(case, shape, torch.float32, seed=9)
    wanted, grads = call_case(case, tensors, others, options, backend)
    nan_in_fresh_memory()
    value, filled = call_case(case, tensors, others, options, backend)
    assert torch.equal(value, wanted)
    assert all(torch.equal(one, other) for one, other in zip(filled, grads, strict=True))
