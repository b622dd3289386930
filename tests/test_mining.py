"""Hard negatives against plain loops over the score matrix in float64."""

import numpy as np
import pytest
import torch

import fastsim
from fastsim import mining
from tests.measure import assert_close, conditioning
from tests.thresholds import CLEAR


def cosines(queries, corpus):
    q, c = (side / side.norm(dim=1, keepdim=True) for side in (queries, corpus))
    return q @ c.T


def limits_of(positive, margin, relative):
    """What a negative's cosine may not be above, from the positive's."""
    limits = [] if margin is None else [positive - margin]
    return limits if relative is None else [*limits, positive - relative * abs(positive)]


def loops(scores, positives, count, ranks, margin, relative, score_range, ids):
    """The definition, one query at a time."""
    found = []
    for row, of_row in enumerate(scores.tolist()):
        rank, kept = 0, []
        positive = of_row[positives[row]]
        limits = limits_of(positive, margin, relative)
        for score, column in sorted(((s, c) for c, s in enumerate(of_row)), reverse=True):
            same = ids and ids[1][column] in (ids[0][row], ids[1][positives[row]])
            if column == positives[row] or same:
                continue
            rank += 1
            if not ranks[0] <= rank <= ranks[1]:
                continue
            if any(score > limit for limit in limits):
                continue
            if not score_range[0] <= score <= score_range[1]:
                continue
            kept.append(column)
        found.append((kept + [-1] * count)[:count])
    return found


def are_apart(scores, positives, margin, relative, score_range):
    """Whether no two scores of a row, nor a score and a limit, are equal but for rounding."""
    for row, positive in zip(scores, positives, strict=True):
        limits = limits_of(row[positive].item(), margin, relative)
        # Beyond the ends of all cosines there is none.
        limits += [end for end in score_range if abs(end) < 1]
        numbers = torch.cat([row, torch.tensor(limits, dtype=row.dtype)]).sort().values
        if (numbers.diff() <= CLEAR).any():
            return False
    return True


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize(
    ("count", "ranks", "margin", "relative", "score_range", "with_ids"),
    [
        (1, (1, 30), None, None, (-1.0, 1.0), False),
        (3, (1, 3), None, None, (-1.0, 1.0), False),
        (3, (4, 9), None, None, (-1.0, 1.0), True),
        (2, (1, 12), 0.1, None, (-1.0, 1.0), False),
        (2, (1, 12), None, 0.05, (-1.0, 1.0), True),
        (4, (1, 67), None, 0.3, (-1.0, 1.0), False),
        (5, (1, 67), None, None, (-0.1, 0.3), False),
    ],
)
def test_mined_are_those_of_the_loops(
    backend, count, ranks, margin, relative, score_range, with_ids, usable
):
    usable(backend)
    apart, limits = False, (margin, relative, score_range)
    while not apart:
        corpus, positives = torch.randn(67, 12), torch.randint(67, (41,))
        queries = corpus[positives] + 0.7 * torch.randn(41, 12)
        scores = cosines(queries.double(), corpus.double())
        apart = are_apart(scores, positives, *limits)
    ids, options = None, {}
    if with_ids:
        query_ids, corpus_ids = torch.randint(9, (41,)), torch.randint(9, (67,))
        ids = query_ids.tolist(), corpus_ids.tolist()
        options = {"query_ids": query_ids, "corpus_ids": corpus_ids}
    rows, found = fastsim.mine_hard_negatives(
        queries, corpus, positives, count=count, ranks=ranks, margin=margin,
        relative_margin=relative, score_range=score_range, backend=backend, **options,
    )  # fmt: skip
    assert rows.tolist() == loops(scores, positives.tolist(), count, ranks, *limits, ids)
    taken = rows >= 0
    assert (found[~taken] == -torch.inf).all()
    of_taken, of_corpus = torch.where(taken)[0], rows[taken]

    def formula(sides):
        return [cosines(*sides)[of_taken, of_corpus]]

    (moved,) = conditioning(formula, [queries.double(), corpus.double()])
    moved *= torch.finfo(torch.float32).eps
    (dense,), truth = formula([queries, corpus]), scores[of_taken, of_corpus]
    assert_close("scores", found[taken], truth, dense, torch.float32, 1.0, moved)


def arc(count):
    """Rows that are the farther from the first one the later they come."""
    angles = torch.arange(count) * 0.05
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_what_is_left_out_makes_room_for_the_last_rank():
    """The positive; rows with its id, and with the query's."""
    corpus, own = arc(12), torch.tensor([0])
    options = {"count": 3, "ranks": (1, 3)}
    rows, _ = fastsim.mine_hard_negatives(corpus[:1], corpus, own, **options)
    assert rows.tolist() == [[1, 2, 3]]
    ids = {
        "query_ids": torch.tensor([7]),
        "corpus_ids": torch.tensor([1, 7, 7, 1, 1, *range(10, 17)]),
    }
    rows, _ = fastsim.mine_hard_negatives(corpus[:1], corpus, own, **options, **ids)
    assert rows.tolist() == [[5, 6, 7]]


def test_too_few_negatives():
    x, options = torch.eye(3), {"count": 2, "ranks": (1, 2)}
    rows, scores = fastsim.mine_hard_negatives(x, x, **options, score_range=(0.5, 1.0))
    assert torch.equal(rows, torch.full((3, 2), -1))
    assert (scores == -torch.inf).all()
    rows, scores = fastsim.mine_hard_negatives(x[:1], x[:1], **options)  # nor a corpus of as many
    assert rows.tolist() == [[-1, -1]]
    assert (scores == -torch.inf).all()


def test_a_relative_margin_of_a_negative_cosine():
    """-0.63 at most: less than the positive's."""
    cosines = torch.tensor([-0.6, -0.62, -0.7, -0.9])
    corpus = torch.stack([cosines, (1 - cosines.square()).sqrt()], 1)
    rows, _ = fastsim.mine_hard_negatives(
        torch.tensor([[1.0, 0.0]]), corpus, torch.tensor([0]), count=3, relative_margin=0.05
    )
    assert rows.tolist() == [[2, 3, -1]]


@pytest.mark.parametrize("further", [0, 2])
def test_parts_of_the_queries(further, monkeypatch):
    """Each has its own positives, the further ones too."""
    x, positives = torch.randn(30, 6), torch.randperm(30)
    ids = {"query_ids": positives % 5, "corpus_ids": torch.arange(30) % 7}
    options = {"count": 3, "margin": 0.1, **ids}
    if further:
        more = torch.stack([positives.roll(places) for places in range(1, further + 1)], 1)
        positives = torch.cat([positives[:, None], more], 1)
    whole = fastsim.mine_hard_negatives(x, x, positives, **options)
    monkeypatch.setattr(mining, "_QUERIES", 7)
    parts = fastsim.mine_hard_negatives(x, x, positives, **options)
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])


def test_further_positives_are_no_negatives():
    x = torch.randn(40, 8)
    alone, _ = fastsim.mine_hard_negatives(x, x, count=5, ranks=(1, 20))
    table = torch.stack([torch.arange(40), alone[:, 0], alone[:, 2], torch.full((40,), -1)], 1)
    rows, _ = fastsim.mine_hard_negatives(x, x, table, count=3, ranks=(1, 20))
    assert torch.equal(rows, alone[:, [1, 3, 4]])
    rows, _ = fastsim.mine_hard_negatives(x, x, table, count=37, ranks=(1, 37))
    for known, found in zip(table.tolist(), rows.tolist(), strict=True):
        assert sorted(found) == sorted(set(range(40)) - set(known))  # there is room for all others


def test_copies_of_further_positives_are_no_negatives():
    """The corpus holds each row three times; one copy of the second and of the third is named."""
    corpus = arc(12).repeat(3, 1)
    ids = {"query_ids": torch.tensor([50]), "corpus_ids": torch.arange(12).repeat(3)}
    named = torch.tensor([[0, 13, 26, -1]])
    options = {"count": 4, "ranks": (1, 4)}
    rows, _ = fastsim.mine_hard_negatives(corpus[:1], corpus, named, **options, **ids)
    assert sorted((rows % 12).tolist()[0]) == [3, 3, 3, 4]


def test_padding_of_positives_names_no_row():
    """Nor the texts of one: -1 is not the first row of the corpus, which is a negative here."""
    corpus = arc(12)
    ids = {"query_ids": torch.tensor([50]), "corpus_ids": torch.arange(12)}
    rows, _ = fastsim.mine_hard_negatives(
        corpus[3:4], corpus, torch.tensor([[3, -1]]), count=11, **ids
    )
    assert sorted(rows[0].tolist()) == [0, 1, 2, *range(4, 12)]


def test_a_frequent_text_deepens_the_search_by_a_thousand_at_most(monkeypatch):
    """For it every query would be searched as deep."""
    depths, top_k = [], mining.top_k

    def noted(queries, corpus, depth, **options):
        depths.append(depth)
        return top_k(queries, corpus, depth, **options)

    monkeypatch.setattr(mining, "top_k", noted)
    for copies in (600, 1500):
        ids = {"query_ids": torch.zeros(1, dtype=torch.int64)}
        ids["corpus_ids"] = (torch.arange(2000) - copies + 1).clamp(min=0)
        positives = torch.tensor([1999])
        fastsim.mine_hard_negatives(torch.randn(1, 3), torch.randn(2000, 3), positives, **ids)
    # The last rank is 30. The positive counts twice: as such, and as a row with its own id.
    assert depths == [30 + 1 + 600 + 1, 30 + 1 + 1000]


def test_drawn_negatives_lie_in_the_ranks():
    x = torch.randn(50, 8)
    top, _ = fastsim.mine_hard_negatives(x, x, count=10, ranks=(5, 14))
    drawn = [
        fastsim.mine_hard_negatives(x, x, count=3, ranks=(5, 14), sample=True, seed=seed)[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for row, negatives in enumerate(drawn[0].tolist()):
        places = [top[row].tolist().index(negative) for negative in negatives]
        assert places == sorted(set(places))  # the hardest first


def test_ranks_may_lie_beyond_the_corpus():
    """Beyond what an integer of torch holds too."""
    x = torch.randn(6, 4)
    near, _ = fastsim.mine_hard_negatives(x, x, count=5, ranks=(1, 5))
    assert torch.equal(fastsim.mine_hard_negatives(x, x, count=5, ranks=(1, 10**20))[0], near)
    beyond, _ = fastsim.mine_hard_negatives(x, x, ranks=(10**20, 10**21))
    assert beyond.tolist() == [[-1]] * 6


def test_mining_checks_at_the_door():
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match="ranks: wanted 1 <= first"):
        fastsim.mine_hard_negatives(x, x, count=3, ranks=(1, 2))
    with pytest.raises(ValueError, match="corpus: wanted at least 5 rows"):
        fastsim.mine_hard_negatives(x, x[:3])
    with pytest.raises(ValueError, match="wanted both or neither"):
        fastsim.mine_hard_negatives(x, x, query_ids=torch.arange(5))
    with pytest.raises(ValueError, match="positives: wanted rows of the corpus"):
        fastsim.mine_hard_negatives(x, x, torch.tensor([0, 1, 2, 3, 5]))
    for name, value in (
        ("count", 0),
        ("score_range", (0.5, 0.4)),
        ("score_range", (float("nan"), 1.0)),
        ("margin", float("nan")),
        ("seed", 2**64),
        ("sample", "no"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: wanted"):
            fastsim.mine_hard_negatives(x, x, **{name: value})
    with pytest.raises(TypeError, match=r"^relative_margin: wanted"):
        fastsim.mine_hard_negatives(x, x, relative_margin=torch.tensor(0.1))
    for name, value in (
        ("score_range", 0.5),
        ("score_range", (0, 1, 2)),
        ("score_range", ("0", "1")),
        ("score_range", (False, True)),
        ("seed", "a"),
        ("seed", True),
        ("count", 1.5),
        ("count", True),
        ("ranks", (True, 3)),
        ("ranks", 3),
        ("ranks", (1, 2, 3)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: wanted"):
            fastsim.mine_hard_negatives(x, x, **{name: value})
    options = {"count": np.int64(2), "ranks": np.array([1, 3]), "seed": np.int64(1)}
    assert fastsim.mine_hard_negatives(x, x, **options)[0].shape == (5, 2)
    ids = torch.arange(5)
    for few in ({"query_ids": ids[:4]}, {"corpus_ids": ids[:4]}):
        with pytest.raises(ValueError, match=rf"^{next(iter(few))}: wanted .*5.* got .*4"):
            fastsim.mine_hard_negatives(x, x, **{"query_ids": ids, "corpus_ids": ids} | few)
    x[2, 1] = torch.nan
    with pytest.raises(ValueError, match="wanted finite embeddings"):
        fastsim.mine_hard_negatives(x, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_positives_of_any_integer_type(dtype):
    corpus = torch.randn(9, 5)
    positives = torch.randint(9, (6, 2))
    queries = corpus[positives[:, 0]] + 0.3 * torch.randn(6, 5)
    for given in (positives, positives[:, 0]):
        wanted = fastsim.mine_hard_negatives(queries, corpus, given, count=2)
        found = fastsim.mine_hard_negatives(queries, corpus, given.to(dtype), count=2)
        assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize(
    ("positives", "kind", "said"),
    [
        ([0, 1, 2], TypeError, "positives: wanted a torch.Tensor, got list"),
        (torch.tensor([0, 1, 3]), ValueError, "rows of the corpus, 0 to 2, got 0 to 3"),
        (torch.tensor([[0, 3], [1, -1], [2, -1]]), ValueError, "to 2, or -1 for none, got -1 to 3"),
        (torch.tensor([[0, -2], [1, -1], [2, -1]]), ValueError, "or -1 for none, got -2 to -1"),
        (torch.empty(3, 0, dtype=torch.int64), ValueError, r"or \(N, P\) with .* got \(3, 0\)"),
        (torch.zeros(3, 1, 1, dtype=torch.int64), ValueError, r"\(N, P\) .* got \(3, 1, 1\)"),
        (torch.tensor(0), ValueError, r"wanted shape \(N,\), .* got \(\)"),
        (torch.tensor([[-1, 0], [1, 0], [2, 0]]), ValueError, "0 to 2, got -1 to 2"),
    ],
)
def test_wrong_positives(positives, kind, said):
    x = torch.randn(3, 4)
    with pytest.raises(kind, match=said):
        fastsim.mine_hard_negatives(x, x, positives)


def test_copies_are_found_whatever_their_cosine_is_rounded_to():
    """Every row has a copy, whose cosine is 1 but for rounding, within the range up to 1."""
    x = torch.randn(500, 37)
    rows, scores = fastsim.mine_hard_negatives(x, torch.cat([x, x * 3.0]))
    assert (rows[:, 0] == torch.arange(500, 1000)).all()
    assert (scores <= 1).all()


def test_the_ends_of_the_range_lie_in_it():
    """Rows and their opposites, of the cosines 1, 0 and -1."""
    x = torch.eye(3)
    own = torch.tensor([0, 1, 2])
    corpus = torch.cat([x, 2 * x, -x])
    for score_range, kept in (((-1.0, 0.0), 7), ((0.0, 1.0), 7), ((-1.0, 1.0), 8)):
        rows, _ = fastsim.mine_hard_negatives(
            x, corpus, own, count=8, ranks=(1, 8), score_range=score_range
        )
        assert ((rows >= 0).sum(1) == kept).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize(
    ("margin", "relative", "score_range"),
    [(None, None, None), (1.5, None, None), (None, 0.3, None), (None, None, (-2.0, 3.0))],
)
def test_mined_by_dot_products_are_those_of_the_loops(
    margin, relative, score_range, backend, dtype, usable
):
    """Of rows of many lengths, whose order by cosine is another."""
    usable(backend)
    limits, apart = (margin, relative, score_range or (-np.inf, np.inf)), False
    while not apart:
        lengths = torch.randn(40, 1).exp()
        corpus, positives = (lengths * torch.randn(40, 12)).to(dtype), torch.randint(40, (30,))
        queries = (torch.randn(30, 1).exp() * torch.randn(30, 12)).to(dtype)
        q, c = queries.double(), corpus.double()
        scores, largest = q @ c.T, q.norm(dim=1) * c.norm(dim=1).max()
        # In units of the largest score that a query can have, as a cosine is.
        unit = scores / largest[:, None]
        ends = [end for end in limits[2] if abs(end) < np.inf]
        apart = all(
            are_apart(
                unit[[row]], positives[[row]], None if margin is None else margin / size, relative,
                [end / size for end in ends],
            )
            for row, size in enumerate(largest.tolist())
        )  # fmt: skip
    rows, found = fastsim.mine_hard_negatives(
        queries, corpus, positives, count=3, ranks=(2, 20), similarity="dot", margin=margin,
        relative_margin=relative, score_range=score_range, backend=backend,
    )  # fmt: skip
    assert rows.tolist() == loops(scores, positives.tolist(), 3, (2, 20), *limits, None)
    taken = rows >= 0
    assert (found[~taken] == -torch.inf).all()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # A cosine of rows of D + 1 numbers, times the lengths.
    bound = 2 * (12 + 1) * torch.finfo(found.dtype).eps * largest[:, None].expand(rows.shape)
    error = (found.double() - scores.gather(1, rows.clamp(min=0))).abs()
    assert (error <= bound)[taken].all()


def test_what_has_no_dot_product_is_refused():
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match="similarity: wanted one of 'cosine', 'dot', got 'l2'"):
        fastsim.mine_hard_negatives(x, x, similarity="l2")
    for bad in (torch.nan, torch.inf):
        x[2, 1] = bad
        with pytest.raises(ValueError, match="wanted finite embeddings"):
            fastsim.mine_hard_negatives(torch.randn(5, 4), x, similarity="dot")
