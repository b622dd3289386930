"""Every loss through the CUDA backend, its kernels emulated, against oracles and dense formulas."""

import os

import pytest
import torch

import fastsim
from fastsim import losses
from tests.cases import BY_NAME, CASES, call, inputs
from tests.losses.test_losses import compare, names
from tests.measure import assert_close, conditioning

# The engine for sm_90 takes 16-bit inputs alone; float32 is the other engine's.
PORTABLE = os.environ.get("FASTSIM_EMULATED_ENGINE") != "hopper"
DTYPES = (torch.float32, torch.float16) if PORTABLE else (torch.float16,)
TILES = [case for case in CASES if case.tile]
MANY = (150, 270, 70)  # two by three tiles, ragged
DEEP = (300, 500, 330)  # four tiles for each of two clusters, ragged, of more steps than stages
SHAPE = MANY if PORTABLE else DEEP


@pytest.mark.skipif(not PORTABLE, reason="float32 operands have one engine")
@pytest.mark.parametrize("case", TILES, ids=names)
def test_equals_the_oracle(case):
    shape = (26, 30, 34) if case.largest < 67 * 75 else (67, 75, 34)
    compare(case, "cuda", torch.float32, shape, seed=11)


def orders(count):
    """As late as it may, and so many random orders, of emulator/machine.h."""
    return [1, *torch.randint(2, 2**31, (count,)).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("case", TILES, ids=names)
def test_many_tiles_equal_the_formula_in_every_order(case, dtype, monkeypatch):
    tensors, others, options = inputs(case, SHAPE, dtype, seed=5)
    first, *further = orders(1)
    monkeypatch.setenv("FASTSIM_EMULATED_ORDER", str(first))
    value, grads = call(case.loss, tensors, others, options | {"backend": "cuda"})
    for order in further:
        monkeypatch.setenv("FASTSIM_EMULATED_ORDER", str(order))
        again, grads_again = call(case.loss, tensors, others, options | {"backend": "cuda"})
        assert torch.equal(again, value), order
        assert all(map(torch.equal, grads_again, grads)), order
    if case.loss is fastsim.full_triplet and dtype == torch.float16:
        return  # rounding to float16 may choose another of two close negatives than the formula
    # The dense formula of cosent_matrix compares every pair of scores with every other.
    eager = options | {"backend": "cpu" if case.loss is fastsim.cosent_matrix else "eager"}

    def results(sides):
        value, grads = call(case.loss, sides, others, eager)
        return [value, *grads]

    exact = [t if t is None else t.double() for t in tensors]
    dense = results([t if t is None else t.float() for t in tensors])
    # Both operands of the scores and the panel of score gradients are rounded to the type.
    half = torch.finfo(dtype).eps / 2
    moved = (half * move for move in conditioning(results, exact))
    for parts in zip((value, *grads), results(exact), dense, moved, strict=True):
        got, wanted, theirs, move = parts
        assert_close("value or gradient", got, wanted, theirs, dtype, moved=move)


@pytest.mark.skipif(not PORTABLE, reason="float32 operands have one engine")
def test_tf32(precision):
    case = BY_NAME["info_nce-symmetric"]
    tensors, others, options = inputs(case, (40, 150, 70), torch.float32, seed=7)
    precision("high")
    value, _ = call(case.loss, tensors, others, options | {"backend": "cuda"})
    exact = [t.double() for t in tensors]
    truth, _ = call(case.loss, exact, others, options | {"backend": "eager"})
    # A cosine of operands rounded to 11 bits, times the scale of 20.
    assert 0 < (value - truth).abs() <= 20 * 2 * 2.0**-11


@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_closest_negative(mining):
    x, y = torch.randn(140, 24), torch.randn(300, 24)
    y[280] = y[7]  # the smaller column among equals, in another tile
    y[200:202] = y[140:142]
    x, y = (t.half() for t in (x, y))
    values, indices = losses.closest_negative(x, y, mining=mining, backend="cuda")
    unit_x, unit_y = (torch.nn.functional.normalize(t.double()) for t in (x, y))
    scores = unit_x @ unit_y.T
    rounding = 4 * torch.finfo(torch.float16).eps
    for i, (value, j) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
        ceiling = scores[i, i] if mining == "semi-hard" else 2.0
        sure = [s for k, s in enumerate(scores[i].tolist()) if k != i and s <= ceiling - rounding]
        if sure:
            assert j != i
            assert abs(value - scores[i, j]) <= rounding
            assert max(sure) - rounding <= scores[i, j] <= ceiling + rounding
        assert j not in (200, 201)
        assert i == 7 or j != 280


def test_a_copy_of_the_positive_is_semi_hard():
    x = torch.randn(140, 40, dtype=torch.float16)
    _, indices = losses.closest_negative(x, torch.cat([x, x]), mining="semi-hard", backend="cuda")
    assert indices.tolist() == list(range(140, 280))


@pytest.mark.parametrize("temperature", [0.001, 100.0])
def test_any_temperature_is_finite(temperature):
    x, y = (torch.randn(20, 12).half().requires_grad_() for _ in "xy")
    for options in ({"symmetric": True}, {"symmetric": False}):
        loss = losses.info_nce(x, y, temperature=temperature, backend="cuda", **options)
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert y.grad.isfinite().all()


@pytest.mark.parametrize("case", TILES, ids=names)
def test_nan_reaches_the_loss(case):
    tensors, others, options = inputs(case, (20, 33, 12), torch.float16, seed=2)
    tensors[0][3, 5] = torch.nan
    assert not case.loss(*tensors, *others, **options, backend="cuda").isfinite()


# ---- refusals of the operators ----

HALF = torch.float16
NUMBERS = torch.zeros(2, 4)  # for any argument of float32 numbers
COLUMNS = torch.zeros(2, 4, dtype=torch.int32)


def tiles(**changed):
    """The first arguments of an operator over tiles, of 5 rows and 7 columns."""
    arguments = {"x": torch.zeros(5, 64, dtype=HALF), "y": torch.zeros(7, 64, dtype=HALF)}
    arguments |= {"product": "half", "row0": 0, "row1": 5, "column0": 0, "column1": 7}
    pairs = ("positives", "row_ids", "column_ids", "row_groups", "column_groups", "dense")
    arguments |= dict.fromkeys(pairs) | {"negative_target": -1.0, "skip": "nothing", "stream": 0}
    assert changed.keys() <= arguments.keys()
    return (arguments | changed).values()


def softmax(*further, **changed):
    return (*tiles(**changed), NUMBERS[0, :1], 0.0, NUMBERS, NUMBERS, *further)


REFUSED = [
    (
        "closest",
        (*tiles(product="odd"), None, NUMBERS, COLUMNS),
        "product: wanted half, tf32 or .*odd",
    ),
    (
        "closest",
        (*tiles(y=torch.zeros(7, 32, dtype=HALF)), None, NUMBERS, COLUMNS),
        r"y: wanted unit rows Half .* got \(7, 32\) Half, strides \(32, 1\), on a GPU",
    ),
    (
        "closest",
        (*tiles(row1=6), None, NUMBERS, COLUMNS),
        r"row0, .*: wanted a block inside \(5, 7\), got 0, 6, 0, 7",
    ),
    ("closest", (*tiles(skip="odd"), None, NUMBERS, COLUMNS), "skip: wanted .*, got odd"),
    (
        "closest",
        (*tiles(), None, NUMBERS.double(), COLUMNS),
        r"top: wanted contiguous numbers Float on a GPU, got \(2, 4\) Double",
    ),
    (
        "closest",
        (*tiles(row_ids=torch.zeros(5)), None, NUMBERS, COLUMNS),
        "row_ids: wanted contiguous numbers Long on a GPU, got",
    ),
    ("softmax_forward", softmax(NUMBERS, *[None] * 4), "positives: wanted .*, got none"),
    (
        "softmax_forward",
        softmax(None, NUMBERS, *[None] * 3),
        "target_scores, target_sums: wanted both without positive, got one",
    ),
    (
        "softmax_score_grad",
        (
            *softmax(NUMBERS, NUMBERS, NUMBERS, row_groups=torch.zeros(5, dtype=torch.int64)),
            torch.zeros(5, 8, dtype=HALF),
        ),
        "column_top: wanted none beside dense or row_groups, got",
    ),
    (
        "squared_error",
        (*tiles(), None, NUMBERS, torch.zeros(5, 7, dtype=HALF)),
        r"panel: wanted \(5, 7\) Half on a GPU, in rows .*, got \(5, 7\) Half, strides \(7, 1\)",
    ),
    ("squared_error", (*tiles(), None, NUMBERS, None), "weights, panel: wanted both .*, got one"),
    (
        "sigmoid",
        (*tiles(), NUMBERS, NUMBERS, NUMBERS, None, None, None),
        "loss, score_grad: wanted both or neither, got one",
    ),
    (
        "unit_rows",
        (NUMBERS.double(), NUMBERS, None, "full", 0),
        "x: wanted rows Half, BFloat16 or Float on a GPU, got .* Double",
    ),
    ("unit_rows", (NUMBERS, NUMBERS, None, "half", 0), "unit: wanted contiguous rows Half .*, got"),
    (
        "unit_rows_backward",
        (NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS.half(), NUMBERS, 0),
        "grad: wanted contiguous rows of x's dtype or Float on a GPU, got .* Half",
    ),
    (
        "scan",
        (torch.zeros(3), torch.zeros(5).double(), torch.zeros(2, 3).double(), 0),
        r"scratch: wanted \(2, 1, 2\), got \(5\) Double",
    ),
]


@pytest.mark.skipif(not PORTABLE, reason="the operators are the same for both engines")
@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    REFUSED,
    ids=[f"{name}-{said.split(':')[0]}" for name, _, said in REFUSED],
)
def test_what_an_operator_refuses(operator, arguments, message):
    """The error names the argument, what was wanted and what came."""
    with pytest.raises(RuntimeError, match=f"fastsim: {message}"):
        getattr(torch.ops.fastsim_cuda, operator)(*arguments)
