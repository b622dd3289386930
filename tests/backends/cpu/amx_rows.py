"""What test_amx.py runs of losses of whole rows in one call, as amx_losses.py.

Of such a loss more than the scores decides: a teacher's, a guide's, numbers of columns.
"""

import functools

import pytest
import torch

import fastsim
from fastsim.backends.cpu import amx_loss, further, one_call, sizes, triplet
from fastsim.engine.one_call import in_panels
from tests.backends.cpu.amx_losses import (
    DTYPES,
    compare,
    integers,
    nearly_parallel,
    results,
    rows_of,
)
from tests.threads import assert_same_bits

SHAPES = [(1, 1, 6), (67, 75, 34), (300, 530, 40), (130, 140, 600)]


def clusters(rows, columns, dtype):
    """Rows of few directions, whose cosines are either equal or far from each other."""
    directions = torch.randn(5, 12)
    sides = (directions[integers(5, n)] for n in (rows, columns))
    return [side.to(dtype) for side in sides]


def made(loss, **makers):
    """What makes a loss of n rows and m columns of a dtype; makers: of its options."""

    def make(n, m, dtype):
        options = {
            name: maker(n, m, dtype) if callable(maker) else maker for name, maker in makers.items()
        }
        return functools.partial(loss, **options)

    return make


def positives(n, m, _):
    return integers(m, n)


def of_teacher(side, dtype=None):
    """Embeddings of one side by a teacher; dtype: by default that of the rows."""
    return lambda n, m, own: torch.randn((n, m)[side], 21).to(dtype or own)


def with_references(x, y, *, rows, temperature=0.05, **options):
    return fastsim.info_nce(x, y, references=rows.to(x), temperature=temperature, **options)


TEACHERS = {
    "own dtype": {"teacher_x": of_teacher(0), "teacher_y": of_teacher(1)},
    "float32": {
        "teacher_x": of_teacher(0, torch.float32),
        "teacher_y": of_teacher(1, torch.float32),
    },
    "scores": {"teacher_x": lambda n, m, _: torch.randn(n, m)},
}
LOSSES = {
    "decoupled": made(fastsim.decoupled_contrastive, positives=positives),
    "debiased": made(fastsim.debiased_contrastive),
    "biased": made(
        fastsim.info_nce, positives=positives, candidate_bias=lambda n, m, _: torch.randn(m)
    ),
    "exclude_above": made(fastsim.info_nce, positives=positives, exclude_above=0.3),
    "guided": made(fastsim.info_nce, guide=clusters),
    "guided by float32": made(
        fastsim.info_nce,
        guide=lambda n, m, _: clusters(n, m, torch.float32),
        guide_margin=0.02,
        guide_strategy="relative",
    ),
    "smoothed": made(fastsim.info_nce, label_smoothing=0.2),
    "smoothed and biased": made(
        fastsim.info_nce,
        positives=positives,
        label_smoothing=0.2,
        candidate_bias=lambda n, m, _: torch.randn(m),
    ),
    "references": made(
        with_references,
        positives=positives,
        rows=lambda n, m, dtype: torch.randn(41, WIDTHS[n]).to(dtype),
    ),
    **{
        f"distill {kind} {name}": made(fastsim.distill, kind=kind, **teacher)
        for kind in ("kl", "margin_mse")
        for name, teacher in TEACHERS.items()
    },
}
WIDTHS = {shape[0]: shape[2] for shape in SHAPES}
# A score at a threshold may be on either side of it: few scores have one so near.
TRIED = [
    (name, shape)
    for name in LOSSES
    for shape in SHAPES
    if name != "exclude_above" or shape[0] * shape[1] < 20_000
]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Small batches too, each by the operators: the number of calls so far."""
    calls = []
    for name in ("SMALL", "SMALL_OF_ONE_PART", "SMALL_OF_BFLOAT16"):
        monkeypatch.setattr(one_call, name, 0)
    monkeypatch.setattr(sizes, "CHEAP", 0)
    monkeypatch.setattr(further, "MOST_REFERENCES", 1000)

    def counted(function):
        def call(*given):
            calls.append(given)
            return function(*given)

        return call

    monkeypatch.setattr(amx_loss, "loss", counted(amx_loss.loss))
    monkeypatch.setattr(triplet, "full_triplet", counted(triplet.full_triplet))
    yield calls
    assert calls


def numbers_of(function, columns):
    """The loss's options, and what says how large its score gradients are."""
    numbers = (function.func.__kwdefaults__ or {}) | function.keywords
    if numbers.get("kind") == "margin_mse":
        numbers["targets of a row"] = columns
    return numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "shape"), TRIED, ids=str)
def test_against_float64(name, shape, dtype):
    function, sides = LOSSES[name](*shape[:2], dtype), rows_of(shape, dtype)
    oracle = functools.partial(function, backend="eager")
    compare(function, sides, oracle, numbers_of(function, shape[1]))


def rows_apart(shape, dtype, margin=0.25, gap=1e-6):
    """Sides of which rounding decides nothing: no score is near its positive's, or that less the
    margin, and no two closest negatives are near each other.
    """
    while True:
        sides = rows_of(shape, dtype)
        x, y = (torch.nn.functional.normalize(side.double(), dim=1) for side in sides)
        scores = x @ y.T
        own = scores.diagonal()[:, None].clone()
        scores.fill_diagonal_(-torch.inf)
        others = scores.masked_fill(scores == -torch.inf, torch.nan)
        mean = others.nanmean(1, keepdim=True)
        near = [others - own, others - own + margin, mean - own + margin]
        for admitted in (scores, scores.masked_fill(scores > own, -torch.inf)):
            near.append(admitted.topk(2, dim=1).values.diff(dim=1))
        if all(one.nan_to_num(1.0, 1.0, -1.0).abs().min() > gap for one in near):
            return sides


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(67, 67, 34), (530, 530, 40), (150, 160, 600)], ids=str)
@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_full_triplet_against_float64(mining, shape, dtype, served):
    function = functools.partial(fastsim.full_triplet, mining=mining)
    sides = rows_apart(shape, dtype)
    compare(function, sides, functools.partial(function, backend="eager"), {})
    assert served[0][3]  # parts


@pytest.mark.parametrize("rows", [rows_of, nearly_parallel])
@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_gradients_are_off_by_their_own_rounding(name, rows):
    """Of unit rows: else one row of a small norm, whose gradient is large, would outweigh all."""
    shape = 300, 530, 40
    sides = rows(shape, torch.bfloat16)
    function = LOSSES[name](*shape[:2], torch.bfloat16)
    oracle = functools.partial(function, backend="eager")
    given = functools.partial(function, backend="cpu"), oracle
    mine, dense = (results(one, sides)[1:] for one in given)
    truth = results(oracle, [side.double() for side in sides])[1:]
    for got, theirs, wanted, side in zip(mine, dense, truth, sides, strict=True):
        norms = side.double().norm(dim=1, keepdim=True)

        def error(of, wanted=wanted, norms=norms):
            return ((of - wanted) * norms).norm()

        assert error(got) <= 1.05 * max(error(wanted.bfloat16()), error(theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["guided", "distill kl float32", "full_triplet"])
def test_same_bits_with_any_number_of_threads(name, dtype):
    sides, loss = rows_of((1100, 1100, 33), dtype), fastsim.full_triplet
    if name in LOSSES:
        loss = LOSSES[name](1100, 1100, dtype)
    loss = functools.partial(loss, backend="cpu")
    assert_same_bits(lambda: results(loss, sides), (1, 2, 5, 5))


@pytest.mark.parametrize("name", ["biased", "guided", "smoothed", "references"])
def test_a_learnt_temperature_as_in_panels(name):
    sides = rows_of((300, 530, 40), torch.bfloat16)
    function = LOSSES[name](300, 530, torch.bfloat16)

    def gradient():
        def loss(x, y, temperature):
            return function(x, y, temperature=temperature, backend="cpu")

        return results(loss, sides, torch.tensor(0.07))[-1]

    mine = gradient()
    with in_panels():
        panels = gradient()
    # It is a sum over all scores; what one part leaves of a small score gradient is off by up to
    # 2^-9 of it, one way or the other.
    assert (mine - panels).abs() <= 2 * 2.0**-9 / len(sides[0]) ** 0.5 * panels.abs()


@pytest.mark.parametrize("name", ["decoupled", "biased", "guided", "full_triplet"])
def test_metrics_as_in_panels(name):
    sides = rows_of((300, 300, 33), torch.bfloat16)
    loss = LOSSES[name](300, 300, torch.bfloat16) if name in LOSSES else fastsim.full_triplet
    loss = functools.partial(loss, backend="cpu")
    with fastsim.metrics() as mine:
        loss(*sides)
    with fastsim.metrics() as panels, in_panels():
        loss(*sides)
    assert mine.read() == pytest.approx(panels.read(), rel=1e-5, nan_ok=True)


def test_prefixes_are_not_left_out(monkeypatch, served):
    """Their sum is made in float32, where the loss of one width would have products of parts."""
    monkeypatch.setattr(one_call, "SMALL_OF_ONE_PART", 1 << 40)
    sides = rows_of((67, 75, 34), torch.bfloat16)

    def function(x, y, *, backend):
        loss = fastsim.losses.InfoNCE(temperature=0.05, backend=backend)
        return fastsim.losses.Matryoshka(loss, (34, 17, 5))(x, y)

    oracle = functools.partial(function, backend="eager")
    compare(function, sides, oracle, {"temperature": 0.05, "targets of a row": 3})
    assert not served
    served.append(None)


@pytest.mark.skipif(torch.float32 not in DTYPES, reason="float32 rows are not split")
def test_many_references_of_float32_rows(monkeypatch, served):
    """One matrix computes their gradient too. In three parts that takes longer than it saves."""
    monkeypatch.setattr(further, "MOST_REFERENCES", 4)
    x, y = rows_of((67, 75, 34), torch.float32)
    with_references(x, y, rows=torch.randn(4 * 75 + 1, 34))
    assert not served
    with_references(x, y, rows=torch.randn(4 * 75, 34))
