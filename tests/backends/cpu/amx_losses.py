"""What test_amx.py runs of losses in one call, in a process that has products of bfloat16 operands,
or an emulation.
"""

import contextlib
import functools
import itertools

import pytest
import torch

import fastsim
from fastsim import losses
from fastsim.backends.cpu import amx, amx_loss, one_call
from fastsim.engine.one_call import in_panels
from tests.cases import BY_NAME, call, inputs
from tests.measure import assert_close, conditioning
from tests.threads import assert_same_bits

DTYPES = [d for d in (torch.float32, torch.bfloat16, torch.float16) if amx.parts(d)]
# One block, and blocks that no tile divides, in several bands.
SHAPES = [(1, 1, 6), (67, 75, 34), (300, 530, 40), (530, 261, 33), (130, 40, 600)]


def integers(high, *shape):
    return torch.randint(high, shape)


LOSSES = {
    "info_nce": lambda n, m: functools.partial(fastsim.info_nce, positives=integers(m, n)),
    "info_nce both": lambda n, m: functools.partial(
        fastsim.info_nce, positives=torch.randperm(max(n, m))[:n] % m, symmetric=True
    ),
    "info_nce margin": lambda n, m: functools.partial(
        fastsim.info_nce, positives=integers(m, n), margin=0.3, temperature=0.01
    ),
    "info_nce both margin": lambda n, m: functools.partial(
        fastsim.info_nce, positives=integers(m, n), margin=0.3, symmetric=True
    ),
    "info_nce exclude": lambda n, m: functools.partial(
        fastsim.info_nce, positives=integers(m, n), exclude=(integers(9, n), integers(9, m))
    ),
    "siglip": lambda n, m: functools.partial(
        fastsim.siglip, targets=(integers(9, n), integers(9, m))
    ),
    "siglip matrix": lambda n, m: functools.partial(
        fastsim.siglip, targets=integers(2, n, m).to(torch.int8) * 2 - 1
    ),
    "matrix_cross_entropy": lambda n, m: functools.partial(
        fastsim.matrix_cross_entropy, targets=torch.rand(n, m)
    ),
    "matrix_mse": lambda n, m: functools.partial(
        fastsim.matrix_mse, targets=torch.randn(m, n).bfloat16().T
    ),
}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Small batches too, each by the operator: the number of calls so far."""
    calls = []
    loss = amx_loss.loss
    for name in ("SMALL", "SMALL_OF_ONE_PART", "SMALL_OF_BFLOAT16"):
        monkeypatch.setattr(one_call, name, 0)
    monkeypatch.setattr(amx_loss, "loss", lambda *given: (calls.append(1), loss(*given)))
    yield calls
    assert calls


def rows_of(shape, dtype):
    """Sides that have something in common, with rows of all sizes."""
    rows, columns, width = shape
    both = torch.randn(width) + torch.randn(rows + columns, width)
    return [t.to(dtype) for t in (both * torch.rand(rows + columns, 1)).split((rows, columns))]


def compare(function, sides, oracle, numbers):
    """No further from float64 than twice the dense formula and the rounding of terms in float32.

    numbers: the loss's options, of which one says how steep it is.
    """

    def of(loss, sides):
        value, grads = call(loss, sides, [], {})
        return [value, *grads]

    wide = [t.double() for t in sides]
    moves = conditioning(functools.partial(of, oracle), wide)
    mine, dense = (
        of(functools.partial(function, backend=name), sides) for name in ("cpu", "eager")
    )
    eps = torch.finfo(torch.float32).eps
    steepest = max(1.0, numbers.get("scale") or 1.0, 1 / (numbers.get("temperature") or 1.0))
    # Score gradients of a row are T p - t: as many times larger as its targets t add up to, T.
    steepest *= numbers.get("targets of a row") or 1.0
    term = steepest / min(t.norm(dim=-1).min().item() for t in wide) / len(sides[0])
    for place, (got, truth, theirs, move) in enumerate(
        zip(mine, of(oracle, wide), dense, moves, strict=True)
    ):
        dtype = sides[0].dtype if place else torch.float32
        # A gradient is rounded to its dtype; where its terms cancel, by their own rounding.
        size = term * eps / torch.finfo(dtype).eps if place else 1.0
        assert_close(f"result {place}", got, truth, theirs, dtype, size, eps * move)


# Columns that are operands at a time; bytes for these and for scores kept from a first look on.
MEMORY = {
    "whole rows": (amx_loss.STRIPE, amx_loss.KEPT),
    "one band kept": (amx_loss.STRIPE, 2 << 20),
    "stripes": (256, 0),
}


@pytest.fixture(params=MEMORY)
def memory(request, monkeypatch):
    for name, value in zip(("STRIPE", "KEPT"), MEMORY[request.param], strict=True):
        monkeypatch.setattr(amx_loss, name, value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("memory")
def test_against_float64(name, shape, dtype):
    function = LOSSES[name](*shape[:2])
    sides = rows_of(shape, dtype)
    numbers = (function.func.__kwdefaults__ or {}) | function.keywords
    if name == "matrix_cross_entropy":
        numbers["targets of a row"] = numbers["targets"].sum(1).max().item()
    compare(function, sides, functools.partial(function, backend="eager"), numbers)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["info_nce", "info_nce both margin", "siglip matrix"])
@pytest.mark.usefixtures("memory")
def test_dot_products(name, shape, dtype):
    """Some of them far above 1, which no cosine is."""
    function = functools.partial(LOSSES[name](*shape[:2]), similarity="dot")
    sides = [3 * side / shape[2] ** 0.5 for side in rows_of(shape, dtype)]
    numbers = (function.func.__kwdefaults__ or {}) | function.keywords
    compare(function, sides, functools.partial(function, backend="eager"), numbers)


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="no products of bfloat16")
@pytest.mark.parametrize("strong", [False, True], ids=["all short", "one of them sure"])
def test_dot_products_of_rows_of_two_sizes(strong):
    """Short rows, whose score gradients one part holds, beside long ones, in another direction.

    In one call these are small beside those of the long rows; in panels beside those of a short one
    that is sure of a few candidates. Truth is the formula in float64; a row's gradient may be off
    by the rounding of its terms.
    """
    rows, width = 530, 48
    x, y = torch.randn(2, rows, width) / width**0.5
    x[: rows // 2] *= 1e-3
    x[rows // 2 :, 0] += 60
    y[:, 0] = -1.0  # the long rows have all their mass on the last candidate
    y[-1, 0] = 2.0
    if strong:
        x[0], y[:4, 1] = 3 * torch.eye(width)[1], 6.0
    x, y = x.bfloat16(), y.bfloat16()
    positives = torch.full((rows,), rows - 1)
    shares = torch.softmax(x.double() @ y.double().T, 1) / rows
    shares[:, -1] -= 1 / rows
    exact, terms = shares.T @ x.double(), shares.abs().T @ x.double().norm(dim=1)
    for how in (contextlib.nullcontext, in_panels):
        given = [side.clone().requires_grad_() for side in (x, y)]
        with how():
            loss = fastsim.info_nce(
                *given, positives, temperature=1.0, similarity="dot", backend="cpu"
            )
            loss.backward()
        off = (given[1].grad.double() - exact).norm(dim=1)
        assert (off <= 2 * torch.finfo(torch.bfloat16).eps * terms).all(), how.__name__


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_columns_of_many_rows_near_the_end_of_training(dtype):
    """What one sum in float32 would lose of a column's other shares beside that of its positive."""
    x = torch.randn(900, 96)
    sides = [side.to(dtype) for side in (x, x + 0.3 * torch.randn(x.shape))]
    numbers = {"temperature": 0.05, "symmetric": True}
    function = functools.partial(fastsim.info_nce, **numbers)
    oracle = functools.partial(function, backend="eager")
    compare(function, sides, oracle, numbers)
    # No more than one rounding of 1, the share that a positive has of its sum.
    error = function(*sides, backend="cpu") - oracle(*(side.double() for side in sides))
    assert abs(error) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["info_nce", "siglip-soft", "matrix_mse-soft"])
def test_against_loops(name, dtype):
    case = BY_NAME[name]
    sides, others, options = inputs(case, (29, 37, 18), dtype, 71)
    function = functools.partial(case.loss, *(), **options)
    compare(
        lambda x, y, backend: function(x, y, *others, backend=backend),
        sides,
        lambda x, y: case.oracle(x, y, *others, **options).mean(),
        (case.loss.__kwdefaults__ or {}) | options,
    )


def nearly_parallel(shape, dtype):
    """Each side's rows around one of its own, and of all sizes: cosines of 0.9999 within a side."""
    *counts, width = shape
    sides = [torch.randn(width) + 0.01 * torch.randn(count, width) for count in counts]
    return [(side * (0.5 + torch.rand(len(side), 1))).to(dtype) for side in sides]


@pytest.mark.parametrize("how", [contextlib.nullcontext, in_panels])
@pytest.mark.parametrize("rows", [rows_of, nearly_parallel])
@pytest.mark.parametrize("name", ["info_nce", "info_nce both", "siglip", "matrix_mse"])
def test_bfloat16_gradients_are_off_by_their_own_rounding(name, rows, how, served):
    """What is left out of score gradients must not show: one part of all makes it 1.3 times, and 80
    times of rows that are nearly parallel.
    """
    function, sides = LOSSES[name](530, 520), rows((530, 520, 64), torch.bfloat16)
    with how():
        mine = results(functools.partial(function, backend="cpu"), sides)[1:]
    assert bool(served) == (how is not in_panels)
    served.append(1)
    truth = results(functools.partial(function, backend="eager"), [t.double() for t in sides])[1:]
    for got, wanted in zip(mine, truth, strict=True):
        rounding = (wanted.bfloat16() - wanted).norm()
        assert (got - wanted).norm() <= 1.05 * rounding


def results(loss, sides, *numbers):
    leaves = [t.detach().clone().requires_grad_() for t in (*sides, *numbers)]
    value = loss(*leaves)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("memory")
def test_same_bits_with_any_number_of_threads(dtype, symmetric):
    sides = rows_of((1100, 700, 33), dtype)
    sides[1][:, 5] = 3.0
    positives, temperature = integers(700, 1100), torch.tensor(0.05)

    def loss(x, y, temperature):
        return fastsim.info_nce(
            x, y, positives, temperature=temperature, symmetric=symmetric, backend="cpu"
        )

    assert_same_bits(lambda: results(loss, sides, temperature), (1, 2, 5, 5))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", ["info_nce", "info_nce both", "siglip"])
@pytest.mark.usefixtures("memory")
def test_learnt_numbers_as_in_panels(name, similarity):
    """The gradients of scale and bias, and those of one side alone."""
    sides = rows_of((300, 270, 48), torch.bfloat16)
    learnt = {"temperature": 0.07} if name != "siglip" else {"scale": 7.0, "bias": -3.0}
    numbers = [torch.tensor(number) for number in learnt.values()]
    made = functools.partial(LOSSES[name](300, 270), similarity=similarity, backend="cpu")

    def loss(x, y, *given):
        return made(x, y, **dict(zip(learnt, given, strict=True)))

    mine = results(loss, sides, *numbers)
    with in_panels():
        panels = results(loss, sides, *numbers)
    # A number's gradient is a sum over all scores; what one part leaves of a small score gradient
    # is off by up to 2^-9 of it, one way or the other.
    of_number = 2.0**-9 / len(sides[0]) ** 0.5
    for one, other in zip(mine, panels, strict=True):
        kept = torch.finfo(one.dtype).eps if one.ndim else of_number
        assert (one - other).norm() <= 2 * kept * other.norm()
    x = sides[0].clone().requires_grad_()
    loss(x, sides[1], *numbers).backward()
    assert torch.equal(x.grad, mine[1])


SPECIFICATIONS = {
    fastsim.info_nce: losses.info_nce_from_scores,
    fastsim.siglip: losses.siglip_from_scores,
}


def size_of_terms(function, sides, scale):
    """The sum over all pairs of |score x score gradient|, the terms of the derivative by scale."""
    x, y = (t.double() for t in sides)
    if function.keywords["similarity"] == "cosine":
        x, y = (torch.nn.functional.normalize(t, dim=1, eps=0) for t in (x, y))
    scores = (x @ y.T).requires_grad_()
    options = {name: of for name, of in function.keywords.items() if name != "similarity"}
    SPECIFICATIONS[function.func](scores, **options | scale).mean().backward()
    return (scores * scores.grad).abs().sum().item()


# Dot products of float32 rows are multiplied in panels.
ROWS_IN_ONE_CALL = [
    (dtype, similarity)
    for dtype, similarity in itertools.product(DTYPES, ("cosine", "dot"))
    if (dtype, similarity) != (torch.float32, "dot")
]


@pytest.mark.parametrize(("dtype", "similarity"), ROWS_IN_ONE_CALL, ids=str)
@pytest.mark.parametrize("rows", [rows_of, nearly_parallel])
@pytest.mark.parametrize("name", ["info_nce", "info_nce both margin", "siglip"])
@pytest.mark.usefixtures("memory")
def test_the_derivative_by_scale_has_the_digits_of_a_float32(name, rows, similarity, dtype):
    """Those of the row gradients are fewer: what is left out of score gradients shows in their sum,
    which may cancel.
    """
    function = functools.partial(LOSSES[name](300, 530), similarity=similarity)
    learnt = "scale" if name == "siglip" else "temperature"
    number = torch.tensor(5.0 if name == "siglip" else 0.2)
    sides = rows((300, 530, 64), dtype)

    def derivative(backend, *tensors):
        *tensors, number = (t.clone().requires_grad_() for t in tensors)
        function(*tensors, **{learnt: number}, backend=backend).backward()
        return number.grad

    wide = [t.double() for t in (*sides, number)]
    mine, dense = (derivative(backend, *sides, number) for backend in ("cpu", "eager"))
    size = size_of_terms(function, sides, {learnt: wide[-1]}) / number.item()
    assert_close(learnt, mine, derivative("eager", *wide), dense, torch.float32, size)


def test_rows_that_are_not_finite():
    """Reach the loss, and what they are compared with."""
    sides = rows_of((300, 40, 33), torch.bfloat16)
    sides[0][270, 3] = torch.nan
    loss, grad_x, grad_y = results(functools.partial(fastsim.siglip, backend="cpu"), sides)
    assert loss.isnan()
    assert grad_x[270].isnan().all()
    assert grad_x[:270].isfinite().all()
    assert grad_y.isnan().all()


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", ["info_nce exclude", "siglip"])
@pytest.mark.usefixtures("memory")
def test_metrics_as_in_panels(name, similarity, learnt):
    sides = [t.requires_grad_(learnt) for t in rows_of((300, 330, 33), torch.bfloat16)]
    number = torch.tensor(7.0, requires_grad=learnt)
    steepness = {"scale": number} if name == "siglip" else {"temperature": 1 / number}
    loss = functools.partial(
        LOSSES[name](300, 330), similarity=similarity, backend="cpu", **steepness
    )
    with fastsim.metrics() as mine:
        loss(*sides)
    with fastsim.metrics() as panels, in_panels():
        loss(*sides)
    assert mine.read() == pytest.approx(panels.read(), rel=1e-5, nan_ok=True)
