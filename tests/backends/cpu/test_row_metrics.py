"""What the CPU kernels count in the scores for `fastsim.metrics`, by row and of all rows."""

import pytest
import torch

from fastsim.backends import get
from fastsim.backends.cpu.passes import pair_arguments
from fastsim.batch_metrics import EMPTY, MAXIMA, ROW_METRICS, TOTALS, empty_row_metrics, totals
from fastsim.pairs import Pairs


def counted(scores, roles):
    """A row's numbers by a loop over its scores; those of EMPTY have been left out."""
    numbers = dict.fromkeys(ROW_METRICS, 0.0)
    numbers |= dict.fromkeys(ROW_METRICS[:MAXIMA], EMPTY)
    for score, role in zip(scores.tolist(), roles, strict=True):
        if role == "nothing":
            continue
        if role == "id":
            numbers["excluded_by_id"] += 1
            continue
        if score <= EMPTY:  # as float32 has it
            numbers["excluded_by_score"] += 1
            continue
        numbers[f"highest_{role}"] = max(numbers[f"highest_{role}"], score)
        numbers[f"{role}_sum"] += score
        numbers[f"{role}s"] += 1
    return list(numbers.values())


def some_pairs(kind, rows, columns):
    """(pairs of so many rows and columns, their roles): kind, whether few are akin or many."""
    name, *many = kind.split()
    if name == "positives":
        positives = torch.randint(0, columns, (rows,))
        return Pairs(positives), [
            ["positive" if j == p else "negative" for j in range(columns)]
            for p in positives.tolist()
        ]
    sides = [torch.randint(-2, 1 if many else columns, (n,)) << 40 for n in (rows, columns)]
    same = (sides[0][:, None] == sides[1]).tolist()
    if name == "groups":
        pairs = Pairs(row_groups=sides[0], column_groups=sides[1], skip="diagonal")
        return pairs, [
            ["nothing" if i == j else "positive" if s else "negative" for j, s in enumerate(row)]
            for i, row in enumerate(same)
        ]
    positives = torch.randint(0, columns, (rows,))
    return Pairs(positives, *sides), [
        ["positive" if j == p else "id" if s else "negative" for j, s in enumerate(row)]
        for p, row in zip(positives.tolist(), same, strict=True)
    ]


@pytest.mark.parametrize("left_out", ["none", "few", "one row"])
@pytest.mark.parametrize("columns", [1, 3, 64, 1023, 1027, 4100])
@pytest.mark.parametrize("kind", ["positives", "ids", "ids many", "groups", "groups many"])
def test_the_numbers_of_long_rows(kind, columns, left_out, usable):
    """Rows of several chunks, each with and without a pair that is left out."""
    usable("cpu")
    scores = 2 * torch.rand(9, columns) - 1
    if left_out != "none":
        chance = torch.rand(9, columns) < 3 / columns
        scores[chance if left_out == "few" else slice(2, 3)] = EMPTY
    pairs, roles = some_pairs(kind, 9, columns)
    recorded, before = empty_row_metrics(9, scores.device), scores.clone()
    block = slice(0, 9), slice(0, columns)
    torch.ops.fastsim_cpu.record_metrics(
        scores, *pair_arguments(pairs, block, row_metrics=recorded)
    )
    assert torch.equal(scores, before)
    wanted = [counted(row, mine) for row, mine in zip(scores, roles, strict=True)]
    wanted = torch.tensor(wanted, dtype=torch.float64)
    sums = [ROW_METRICS.index(f"{role}_sum") for role in ("negative", "positive")]
    exact = [k for k in range(len(ROW_METRICS)) if k not in sums]
    assert torch.equal(recorded[:, exact], wanted[:, exact])
    # Of scores below 1, added up in float32 by parts, the parts in float64.
    rounding = columns * torch.finfo(torch.float32).eps
    assert (recorded[:, sums] - wanted[:, sums]).abs().max() <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (33, 40), (300, None)])
def test_one_operator_adds_up_the_same(rows, columns, dtype, usable):
    """The totals of the compiled backend against those of torch's operators."""
    usable("cpu")
    recorded = torch.randn(rows, len(ROW_METRICS), dtype=torch.float64)
    recorded[:, MAXIMA:] = torch.randint(0, 3, (rows, len(ROW_METRICS) - MAXIMA))
    width = 19
    x = torch.randn(rows, 2 * width).to(dtype)[:, ::2]
    y = None if columns is None else torch.randn(columns, width).to(dtype)
    for sides in ((x, y), (None, None)):
        found = dict(zip(TOTALS, get("cpu").batch_totals(recorded, *sides).tolist(), strict=True))
        wanted = totals(recorded, *sides, get("torch").paired_cosines)
        wanted = dict(zip(TOTALS, wanted.tolist(), strict=True))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            # A cosine is a sum of so many products; potentials are e to four times its error.
            eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            size = 4 * 2 * width * eps * rows if "potential" in name else rows * 2.0**-50
            assert found[name] == pytest.approx(value, rel=0, abs=size), name
