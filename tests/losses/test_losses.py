"""Every loss on every backend and dtype against its float64 oracle: value and gradients."""

import functools
import itertools
import sys

import pytest
import torch

import fastsim
from tests import cases
from tests.cases import BY_NAME, CASES, SHAPES, are_clear, call, inputs, on_backend
from tests.losses import rounding
from tests.losses.rounding import dense_options, moves
from tests.measure import assert_close
from tests.seeds import fresh

BACKENDS = tuple(fastsim.backends())
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def names(value):
    return str(value).removeprefix("torch.").replace(" ", "")


def oracle_of(case, others, options, reduction):
    """(oracle with the reduction, the size of what its last sum adds up)."""
    size = 0.0

    def oracle(*arguments, **keywords):
        nonlocal size
        losses = case.oracle(*arguments, **keywords)
        if not case.reduces or reduction == "none":
            return losses
        size = (losses.abs().sum() if reduction == "sum" else losses.abs().mean()).item()
        if reduction == "sum":
            return losses.sum()
        if case.counted is None:
            return losses.mean()
        return losses.sum() / max(case.counted(*others), 1)

    def results(tensors):
        value, grads = call(oracle, tensors, others, options)
        return [value, *grads]

    return results, lambda: size


@functools.lru_cache(maxsize=64)
def truth_of(name, dtype, shape, seed, reduction):
    """(value and gradients of the oracle, the size of its terms), the same for every backend."""
    tensors, others, options = inputs(BY_NAME[name], shape, dtype, seed)
    results, size = oracle_of(BY_NAME[name], others, options, reduction)
    return results([t if t is None else t.double() for t in tensors]), size()


def term_of(case, tensors, options, reduction):
    """The size of one of the terms whose sum a gradient of rows is: what a logit moves with a row.

    The truth in float64 is no wider than the result: where its terms cancel to nothing, what is
    left of their rounding is its own error.
    """
    numbers = (case.loss.__kwdefaults__ or {}) | options
    steepest = max(1.0, numbers.get("scale") or 1.0, 1 / (numbers.get("temperature") or 1.0))
    shortest = min(t.norm(dim=-1).min().item() for t in tensors if t is not None)
    return steepest / shortest / (len(tensors[0]) if reduction in (None, "mean") else 1)


def compare(case, backend, dtype, shape, seed, reduction=None, small=False):
    """small: whether losses are, so that what is added to 1 inside their logarithms is rounded."""
    tensors, others, options = inputs(case, shape, dtype, seed)
    (truth, *truth_grads), size = truth_of(case.name, dtype, shape, seed, reduction)
    reduced = options if reduction is None else options | {"reduction": reduction}
    chosen = on_backend(case, backend)
    # 16-bit inputs are held to the float32 formula; only the rounding of the gradient is theirs.
    compute = torch.promote_types(dtype, torch.float32)
    dense_inputs = [t if t is None else t.to(compute) for t in tensors]
    dense, dense_grads = call(
        case.loss, dense_inputs, others, dense_options(case, options, reduction)
    )
    got, grads = call(case.loss, tensors, others, reduced | chosen)
    assert got.dtype == compute
    eps = torch.finfo(compute).eps
    if small or dtype == torch.float64:  # whose truth has rounded that as well
        size = max(size, 1.0)
    moved, *moved_grads = (eps * move for move in moves(case.name, shape, seed, reduction))
    assert_close("value", got, truth, dense, compute, size, moved)
    term = term_of(case, tensors, options, reduction) if dtype == torch.float64 else 0.0
    for index, parts in enumerate(zip(grads, truth_grads, dense_grads, moved_grads, strict=True)):
        grad, exact_grad, dense_grad, moved = parts
        assert grad.dtype == dtype
        name = f"gradient {index}"
        assert_close(name, grad, exact_grad, dense_grad, dtype, term, moved)


@pytest.mark.covering("case", "backend", "dtype", "shape", step=len(SHAPES))
@pytest.mark.parametrize("shape", SHAPES, ids=names)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_equals_the_oracle(case, backend, dtype, shape, usable):
    usable(backend)
    if shape[0] * shape[1] > case.largest:
        shape = (shape[0] // 3, shape[1] // 3, shape[2])
    compare(case, backend, dtype, shape, seed=sum(shape))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if c.reduces], ids=names)
def test_reductions(case, backend, reduction, usable):
    usable(backend)
    compare(case, backend, torch.float32, (9, 14, 7), seed=3, reduction=reduction)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("case", [c for c in CASES if c.tile], ids=names)
def test_in_passes(case, dtype, backend, in_passes, usable):
    usable(backend)
    compare(case, backend, dtype, (23, 27, 18), seed=11)


def near_inputs(case, shape, dtype, seed):
    """As `inputs`, with the rows of all sides near those of the first."""
    for place in itertools.count(seed):
        (first, *rest), others, options = cases.inputs(case, shape, dtype, place)
        noise = torch.randn(first.shape, generator=fresh(place), dtype=torch.float64)
        alike = [t is not None and t.shape == first.shape for t in rest]
        near = (first + 0.2 * first.double().std() * noise).to(dtype)
        tensors = [first, *(near if a else t for t, a in zip(rest, alike, strict=True))]
        if are_clear(case.loss, tensors, others, options):
            return tensors, others, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_near_the_end_of_training(case, backend, dtype, usable, monkeypatch):
    """Where the positives win, losses and gradients are small differences of large numbers."""
    usable(backend)
    for module in (sys.modules[__name__], rounding):
        monkeypatch.setattr(module, "inputs", near_inputs)
    shape = (90, 90, 24) if case.largest > 8100 else (27, 27, 24)
    compare(case, backend, dtype, shape, seed=31, small=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_columns_of_many_rows(backend, usable):
    """Where the positives win, what one sum in float32 would lose of a column's other shares."""
    usable(backend)
    x = torch.randn(900, 96, generator=fresh(17))
    y = x + 0.3 * torch.randn(x.shape, generator=fresh(18))

    def results(dtype, backend):
        options = {"temperature": 0.05, "symmetric": True, "backend": backend}
        value, grads = call(fastsim.info_nce, [side.to(dtype) for side in (x, y)], [], options)
        return [value, *grads]

    truth, dense = results(torch.float64, "eager"), results(torch.float32, "eager")
    # 1, what the positive has of a sum, is rounded; of the gradient also what makes the norm 1.
    sizes = 1.0, *[1 / (900 * 0.05 * x.norm(dim=1).min().item())] * 2
    found = zip(results(torch.float32, backend), truth, dense, sizes, strict=True)
    for got, exact, of_dense, size in found:
        assert_close("value or gradient", got, exact, of_dense, torch.float32, size)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", [c for c in CASES if c.tile], ids=names)
def test_many_panels(case, reduction, small_panels, usable):
    usable("cpu")
    shape = (26, 29, 18) if case.largest < 10_000 else (61, 141, 18)
    extra = {"reduction": reduction} if case.reduces else {}
    compare(case, "cpu", torch.float32, shape, seed=7, **extra)
