"""Copies of a row tie, wherever they stand: against float64 formulas that are told of them.

The copies are the last columns, which a library's products of float64, and those of float32 of few
rows, add up in another order.
"""

import itertools

import pytest
import torch

import fastsim
from fastsim import losses

BACKENDS = tuple(fastsim.backends())
DTYPES = [torch.float32, torch.float64]
N, M, D = 40, 75, 64
COPIES = M - N  # of the first columns
CLEAR = 1e-6  # of scores: more than float32 rounds, less than those of random rows differ by


def with_copies(width, dtype):
    x, y = torch.randn(N, width, dtype=dtype), torch.randn(M, width, dtype=dtype)
    y[N:] = y[:COPIES]
    return x, y


def cosines(x, y):
    x, y = (side.double() / side.double().norm(dim=1, keepdim=True) for side in (x, y))
    return x @ y.T


def of_softmax(scores, out, scale):
    """InfoNCE of each row by what is left of its scores."""
    logits = (scale * scores).masked_fill(out, -torch.inf)
    return logits.logsumexp(1) - scale * scores.diagonal()


def clearly_above(scores):
    """Which scores (N, M) are above that of the row's positive, copies of it aside."""
    gaps = scores - scores.diagonal()[:, None]
    size = scores.abs().amax(1, keepdim=True)
    row = torch.arange(COPIES)
    gaps[row, N + row] = 0
    return gaps > CLEAR * size, (gaps != 0) & (gaps.abs() <= CLEAR * size)


def draw(width, dtype, scored):
    """(x, y, their scores, which are above the positive's) with no other score close to it."""
    while True:
        x, y = with_copies(width, dtype)
        scores = scored(x, y)
        above, doubtful = clearly_above(scores)
        if not doubtful.any():
            return x, y, scores, above


@pytest.mark.parametrize("panels", [None, "in_passes", "small_panels"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_is_not_above_its_positive(backend, dtype, similarity, panels, request, usable):
    usable(backend)
    if panels is not None:
        request.getfixturevalue(panels)
    scored = cosines if similarity == "cosine" else lambda x, y: x.double() @ y.double().T
    x, y, scores, above = draw(D, dtype, scored)
    options = {"temperature": D**0.5 if similarity == "dot" else 0.1, "similarity": similarity}
    given = options | {"exclude_above": 0.0, "reduction": "none", "backend": backend}
    got = fastsim.info_nce(x, y, **given)
    wanted = of_softmax(scores, above, 1 / options["temperature"])
    # The positive is the largest that is left, so a copy more or less is log(1 + 1 / M) at least;
    # float32 logits are rounded by 1e-5.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_among_own_negatives_is_not_above_its_positive(backend, dtype, similarity, usable):
    usable(backend)
    scored = cosines if similarity == "cosine" else lambda x, y: x.double() @ y.double().T
    x, y, scores, above = draw(D, dtype, scored)
    options = {"temperature": D**0.5 if similarity == "dot" else 0.1, "similarity": similarity}
    given = options | {"exclude_above": 0.0, "reduction": "none", "backend": backend}
    got = fastsim.info_nce(x, y, own_negatives=y[:N, None].clone(), **given)
    scale = 1 / options["temperature"]
    others = of_softmax(scores, above, scale)  # the copy adds exp(0) to the quotient
    torch.testing.assert_close(got.double(), others.exp().add(1).log(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("of_guide", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guide_keeps_copies(backend, dtype, of_guide, usable):
    usable(backend)
    guide_x, guide_y, _, above = draw(9, of_guide, cosines)
    x, y = torch.randn(N, D, dtype=dtype), torch.randn(M, D, dtype=dtype)
    given = {"guide": (guide_x, guide_y), "temperature": 0.1, "reduction": "none"}
    got = fastsim.info_nce(x, y, **given, backend=backend)
    wanted = of_softmax(cosines(x, y), above, 10.0)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("panels", [None, "small_panels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_closest_negative_is_a_copy(backend, dtype, panels, request, usable):
    usable(backend)
    if panels is not None:
        request.getfixturevalue(panels)
    x, y = with_copies(D, dtype)
    values, indices = fastsim.closest_negative(x, y, backend=backend)
    scores = cosines(x, y)
    assert torch.equal(indices[:COPIES], torch.arange(N, M))
    eps = torch.finfo(dtype).eps
    assert (values.double() - scores.diagonal())[:COPIES].abs().max() <= D * eps
    margin = 0.2
    got = losses.full_triplet(x, y, margin=margin, reduction="none", backend=backend).double()
    mean = (scores.sum(1) - scores.diagonal()) / (M - 1)
    wanted = torch.relu(mean - scores.diagonal() + margin) + margin
    assert (got - wanted)[:COPIES].abs().max() <= D * eps


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_is_no_farther_than_its_positive(backend, dtype, distance, usable):
    """One group has eight rows; the last rows are copies of one of them, each its own group."""
    usable(backend)
    x = torch.randn(31, 127, dtype=dtype)
    x[16:] = x[1]
    groups = torch.arange(31)
    groups[:8] = 0
    options = {"margin": 5.0, "distance": distance, "backend": backend}
    got = losses.batch_semi_hard_triplet(x, groups, **options)
    rows = x.double()
    if distance == "euclidean":
        distances = (rows[:, None] - rows).norm(dim=2)
    else:
        distances = 1 - cosines(rows, rows)
    terms = []
    for anchor, positive in itertools.permutations(range(8), 2):
        near, negatives = distances[anchor, positive], distances[anchor, 8:]
        farther = negatives[negatives > near + CLEAR]
        chosen = farther.min() if len(farther) else negatives.max()
        terms.append(torch.relu(near - chosen + 5.0))
    wanted = torch.stack(terms).mean()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)


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
        assert loss >= 0.69  # log 2 at least: the copy is a candidate
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
