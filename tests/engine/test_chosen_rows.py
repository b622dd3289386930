"""Rows against the columns chosen for each: values, gradients, missing and repeated columns."""

from functools import partial

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.engine.chosen_rows import partner_distances, partner_products, row_terms
from tests.measure import assert_close
from tests.threads import assert_same_bits

PLAIN = "plain torch"  # the formulas of backends without a kernel
BACKENDS = (*(name for name in fastsim.backends() if name != "eager"), PLAIN)
FORMULAS = ("centred", "chosen_rows", "chosen_rows_backward", "row_terms", "row_terms_backward")
DTYPES = (torch.float32, torch.float64)
MISSING = (-torch.inf, torch.inf, 3.0)


@pytest.fixture(params=BACKENDS)
def backend(request, usable, monkeypatch):
    """The name of a backend; PLAIN is the CPU's with the formulas in place of the kernels."""
    usable("cpu" if request.param == PLAIN else request.param)
    if request.param != PLAIN:
        return request.param
    for name in FORMULAS:
        monkeypatch.setattr(CpuBackend, name, getattr(Backend, name))
    return "cpu"


def loops(x, y, columns, distances):
    """(K, N) in the dtype of x, a pair at a time; differentiable; a missing one is 0."""
    y = x if y is None else y
    values = []
    for k in range(len(columns)):
        for i, j in enumerate(columns[k].tolist()):
            if j < 0:
                values.append(x[i, 0] * 0)
            elif distances:
                square = ((x[i] - y[j]) ** 2).sum()
                values.append(square.sqrt() if square > 0 else x[i, 0] * 0)
            else:
                values.append((x[i] * y[j]).sum())
    return torch.stack(values).view(columns.shape)


def with_gradients(function, sides, weights):
    """[values, gradients of the given sides] for dL/dvalues = weights."""
    sides = [s if s is None else s.clone().requires_grad_() for s in sides]
    values = function(*sides)
    given = [s for s in sides if s is not None]
    return [values.detach(), *torch.autograd.grad(values, given, weights)]


def points(*shape, dtype):
    """Random; integers in float64, where the truth is no wider: sums of products are exact."""
    return torch.randn(shape) if dtype == torch.float32 else torch.randint(-9, 10, shape).to(dtype)


def compare(function, formula, sides, weights):
    """function against the formula in float64, allowed twice the formula's own error.

    The terms of a distance's gradient are of the size of its weight, and cancel.
    """
    size = weights.abs().sum().item() if weights.dtype == torch.float64 else 1.0
    wide = [s if s is None else s.double() for s in sides]
    truth = with_gradients(formula, wide, weights.double())
    dense = with_gradients(formula, sides, weights)
    got = with_gradients(function, sides, weights)
    names = "values", "first gradient", "second gradient"
    for name, parts in zip(names, zip(got, truth, dense, strict=True), strict=False):
        assert_close(name, *parts, sides[0].dtype, size=size)
    return got


def chosen(itself, dtype):
    """(x, y or None, columns) with missing columns, one that many rows name, and distance 0."""
    x = points(43, 37, dtype=dtype)
    y = None if itself else points(61, 37, dtype=dtype)
    other = x if y is None else y
    columns = torch.randint(-1, len(other), (3, 43))
    columns[1, ::2] = 5
    columns[:, 7] = -1
    if y is not None:
        y[9] = x[3]
    columns[0, 3] = 3 if y is None else 9
    return x, y, columns


@pytest.mark.parametrize("distances", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_loops(backend, dtype, itself, distances):
    *sides, columns = chosen(itself, dtype)
    function = partner_distances if distances else partner_products

    def present(x, y):
        values = function(x, y, columns, MISSING, get(backend))
        instead = torch.tensor(MISSING, dtype=dtype)[:, None].expand(columns.shape)
        assert torch.equal(values[columns < 0], instead[columns < 0])
        return torch.where(columns < 0, 0.0, values)

    def formula(x, y):
        return loops(x, y, columns, distances)

    values, *_ = compare(present, formula, sides, points(*columns.shape, dtype=dtype))
    if distances:
        assert values[0, 3] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_terms(backend, dtype):
    sides = points(23, 19, dtype=dtype), points(57, 19, dtype=dtype)
    columns, first = torch.randint(-1, 57, (23,)), 11
    columns[::3] = 40

    def terms(x, y):
        pairs, sums = row_terms(x, y, columns, first, get(backend))
        return torch.cat([pairs, sums[None]])

    def formula(x, y):
        pairs = loops(x, y, torch.stack([torch.arange(first, first + 23), columns]), False)
        return torch.cat([pairs, sum(x @ row for row in y)[None]])

    compare(terms, formula, sides, points(3, 23, dtype=dtype))


@pytest.mark.parametrize("distances", [False, True])
def test_gradcheck_of_either_side(backend, distances):
    function = partner_distances if distances else partner_products
    x, y = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7))
    columns = torch.randint(0, 7, (2, 5))

    def values(x, y):
        return function(x, y, columns, MISSING[:2], get(backend))

    for sides in ((x, y), (x, y.detach()), (x.detach(), y)):
        assert torch.autograd.gradcheck(values, sides)


def _batch_hard(x, y, groups):
    function = partial(fastsim.batch_hard_triplet, groups=groups, backend="cpu")
    return with_gradients(function, (x,), torch.ones(()))


def _row_terms(x, y, groups):
    def pairs(x, y):
        return row_terms(x, y, groups, 0, get("cpu"))[0]

    return with_gradients(pairs, (x, y), torch.ones(2, len(x)))


@pytest.mark.parametrize("run", [_batch_hard, _row_terms])
def test_threads_change_no_bit(run, usable):
    """Enough rows that every operator is shared out; many of them name the same columns."""
    usable("cpu")
    x, y = torch.randn(900, 64), torch.randn(900, 64)
    groups = torch.randint(0, 30, (900,))
    assert_same_bits(lambda: run(x, y, groups), (1, 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_show(backend, value):
    x, groups = torch.randn(12, 5), torch.arange(12) % 3
    x[4, 2] = value
    assert fastsim.batch_hard_triplet(x, groups, backend=backend).isnan()
    y = torch.randn(9, 5)
    found = fastsim.hardest_pairs(y, groups[:9], x, groups, backend=backend)
    assert found.positive.isnan().all()
    assert found.negative.isnan().all()
