"""Copies of a row tie, wherever they stand: against float64 formulas that are told of them.

The copies are the last columns, which a library's products of float64, and those of float32 of few
rows, add up in another order.
"""

import itertools
import math

import pytest
import torch

import fastsim
from fastsim import losses
from tests.measure import assert_close, conditioning
from tests.thresholds import CLEAR

BACKENDS = tuple(fastsim.backends())
DTYPES = [torch.float32, torch.float64]
N, M, D = 40, 75, 64
COPIES = M - N  # of the first columns


def with_copies(width, dtype):
    x, y = torch.randn(N, width, dtype=dtype), torch.randn(M, width, dtype=dtype)
    y[N:] = y[:COPIES]
    return x, y


def cosines(x, y):
    x, y = (side / side.norm(dim=1, keepdim=True) for side in (x, y))
    return x @ y.T


def dots(x, y):
    return x @ y.T


def of_softmax(scores, out, scale):
    """InfoNCE of each row by what is left of its scores."""
    logits = (scale * scores).masked_fill(out, -torch.inf)
    return logits.logsumexp(1) - scale * scores.diagonal()


def assert_rows(got, formula, x, y):
    """Numbers of rows against a formula of the sides, in float64 and in their own dtype."""
    wide = [x.double(), y.double()]
    (moved,) = conditioning(lambda sides: [formula(*sides)], wide)
    moved *= torch.finfo(x.dtype).eps
    # Of the terms the largest is the 1 of the positive, relative to itself, or a cosine.
    assert_close("rows", got, formula(*wide), formula(x, y), x.dtype, 1.0, moved)


def clearly_above(scores):
    """Which scores (N, M) are above that of the row's positive, copies of it aside."""
    gaps = scores - scores.diagonal()[:, None]
    size = scores.abs().amax(1, keepdim=True)
    row = torch.arange(COPIES)
    gaps[row, N + row] = 0
    return gaps > CLEAR * size, (gaps != 0) & (gaps.abs() <= CLEAR * size)


def draw(width, dtype, scored):
    """(x, y, which scores are above the positive's) with no other score close to it."""
    while True:
        x, y = with_copies(width, dtype)
        above, doubtful = clearly_above(scored(x.double(), y.double()))
        if not doubtful.any():
            return x, y, above


@pytest.mark.parametrize("panels", [None, "in_passes", "small_panels"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_is_not_above_its_positive(backend, dtype, similarity, panels, request, usable):
    usable(backend)
    if panels is not None:
        request.getfixturevalue(panels)
    scored = cosines if similarity == "cosine" else dots
    x, y, above = draw(D, dtype, scored)
    options = {"temperature": D**0.5 if similarity == "dot" else 0.1, "similarity": similarity}
    given = options | {"exclude_above": 0.0, "reduction": "none", "backend": backend}
    got = fastsim.info_nce(x, y, **given)

    def formula(x, y):
        return of_softmax(scored(x, y), above, 1 / options["temperature"])

    # The positive is the largest that is left, so a copy more or less is log(1 + 1 / M) at least.
    assert_rows(got, formula, x, y)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_among_own_negatives_is_not_above_its_positive(backend, dtype, similarity, usable):
    usable(backend)
    scored = cosines if similarity == "cosine" else dots
    x, y, above = draw(D, dtype, scored)
    options = {"temperature": D**0.5 if similarity == "dot" else 0.1, "similarity": similarity}
    given = options | {"exclude_above": 0.0, "reduction": "none", "backend": backend}
    own = y[:N, None].clone()
    if similarity == "cosine":  # the length of a row does not matter
        own *= 0.5 + torch.rand(N, 1, 1)
    got = fastsim.info_nce(x, y, own_negatives=own, **given)

    def formula(x, y):
        others = of_softmax(scored(x, y), above, 1 / options["temperature"])
        return others.exp().add(1).log()  # the copy adds exp(0) to the quotient

    assert_rows(got, formula, x, y)


@pytest.mark.parametrize("of_guide", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guide_keeps_copies(backend, dtype, of_guide, usable):
    usable(backend)
    guide_x, guide_y, above = draw(9, of_guide, cosines)
    x, y = torch.randn(N, D, dtype=dtype), torch.randn(M, D, dtype=dtype)
    given = {"guide": (guide_x, guide_y), "temperature": 0.1, "reduction": "none"}
    got = fastsim.info_nce(x, y, **given, backend=backend)
    assert_rows(got, lambda x, y: of_softmax(cosines(x, y), above, 10.0), x, y)


@pytest.mark.parametrize("panels", [None, "small_panels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_closest_negative_is_a_copy(backend, dtype, panels, request, usable):
    usable(backend)
    if panels is not None:
        request.getfixturevalue(panels)
    x, y = with_copies(D, dtype)
    values, indices = fastsim.closest_negative(x, y, backend=backend)
    assert torch.equal(indices[:COPIES], torch.arange(N, M))
    assert_rows(values[:COPIES], lambda x, y: cosines(x, y).diagonal(N), x, y)
    margin = 0.2
    got = losses.full_triplet(x, y, margin=margin, reduction="none", backend=backend)

    def formula(x, y):
        scores = cosines(x, y)
        positive, copy = scores.diagonal()[:COPIES], scores.diagonal(N)
        mean = (scores.sum(1) - scores.diagonal())[:COPIES] / (M - 1)
        return torch.relu(mean - positive + margin) + torch.relu(copy - positive + margin)

    assert_rows(got[:COPIES], formula, x, y)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_is_no_farther_than_its_positive(backend, dtype, distance, usable):
    """One group has eight rows; the last rows are copies of one of them, each its own group."""
    usable(backend)
    groups = torch.arange(31)
    groups[:8] = 0
    pairs = list(itertools.permutations(range(8), 2))
    anchors, positives = torch.tensor(pairs).T

    def distances(rows):
        if distance == "cosine":
            return 1 - cosines(rows, rows)
        return (rows[:, None] - rows).norm(dim=2)

    doubtful = True
    while doubtful:
        x = torch.randn(31, 127, dtype=dtype)
        x[16:] = x[1]
        of_all = distances(x.double())
        gaps = of_all[anchors] - of_all[anchors, positives][:, None]
        copies = (positives == 1)[:, None] & (torch.arange(31) >= 16)
        gaps = gaps.masked_fill(copies, 0)[:, 8:]
        clear = CLEAR * of_all.max()
        doubtful = ((gaps != 0) & (gaps.abs() <= clear)).any()
    chosen = [  # the nearest that is farther than the positive, else the farthest
        8 + int(row.where(row > 0, torch.inf).argmin() if (row > 0).any() else row.argmax())
        for row in gaps
    ]

    def formula(rows, _):
        of_all = distances(rows)
        near, far = of_all[anchors, positives], of_all[anchors, chosen]
        return torch.relu(near - far + 5.0).mean()

    options = {"margin": 5.0, "distance": distance, "backend": backend}
    assert_rows(losses.batch_semi_hard_triplet(x, groups, **options), formula, x, x)


@pytest.mark.parametrize("shape", [(1, 33), (7, 7), (3, 17)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_in_a_narrow_product_is_not_above_its_positive(backend, dtype, shape, usable):
    """The last candidate is a copy of the first row's positive, which is close to the row."""
    usable(backend)
    rows, columns = shape
    for _ in range(10):
        x, y = torch.randn(rows, D, dtype=dtype), torch.randn(columns, D, dtype=dtype)
        y[0] = x[0] + 0.3 * y[0]
        y[-1] = y[0]
        options = {"reduction": "none", "backend": backend}
        loss = fastsim.info_nce(x, y, exclude_above=0.0, temperature=0.1, **options)[0]
        # log 2 at least, the copy being a candidate; as many roundings of a logit as a score has.
        assert loss >= math.log(2) - D * torch.finfo(dtype).eps / 0.1
        assert fastsim.closest_negative(x, y, backend=backend)[1][0] == columns - 1


@pytest.mark.parametrize("options", [{}, {"margin": 0.0}, {"relative_margin": 0.0}])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_the_positive_is_mined(backend, dtype, options, usable):
    usable(backend)
    for _ in range(10):
        queries, corpus = torch.randn(5, D, dtype=dtype), torch.randn(6, D, dtype=dtype)
        corpus[0] = queries[0] + 0.3 * corpus[0]
        corpus[5] = corpus[0]
        found, _ = fastsim.mine_hard_negatives(
            queries, corpus, ranks=(1, 2), backend=backend, **options
        )
        assert found[0][0] == 5
