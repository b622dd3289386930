"""The loss scale of 16-bit score gradients: none overflows, and those of many scores are not lost.

A float16 below its smallest normal number has few digits, or is 0.
"""

from dataclasses import replace

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.backends.torch import panels
from fastsim.backends.torch.backend import TorchBackend
from fastsim.engine import scoring
from fastsim.engine.call import Call
from fastsim.kinds import KINDS
from fastsim.kinds.kind import largest, largest_target
from fastsim.pairs import Factors, Pairs
from fastsim.tile_loss import TileLoss

N, M = 6, 9
HALF = torch.finfo(torch.float16)
MANY = 10**6
GROUPS = Pairs(row_groups=torch.arange(N) % 3, column_groups=torch.arange(M) % 3)
NORMALISED = replace(GROUPS, negative_target=0.0)
OWN = Pairs(row_groups=torch.arange(N), column_groups=torch.arange(M))
DIAGONAL, SHARED = Pairs(torch.arange(N), distinct=True), Pairs(torch.arange(N) // 4)
DENSE = {
    "ones": torch.ones(N, M, dtype=torch.int8),
    "least": torch.full((N, M), -128, dtype=torch.int8),
    "both signs": 100 * (-1) ** torch.arange(1, M + 1, dtype=torch.int8).repeat(N, 1),
    "one": torch.eye(N, M, dtype=torch.bool),
    "shares": torch.rand(N, M, dtype=torch.float64).softmax(1),
}
UNSURE = torch.randint(5, (N, M)) / 16  # targets near 0, which 1 is added to exactly
SHIFTED = replace(GROUPS, row_shift=torch.linspace(-9, 1, N, dtype=torch.float64))
FACTORS = Factors(*(3 * torch.randn(rows, 5, dtype=torch.float64) for rows in (N, M)))
TILES = {
    "positives": TileLoss("softmax", DIAGONAL),
    "symmetric": TileLoss("softmax", DIAGONAL, symmetric=True),
    "symmetric, shared": TileLoss("softmax", SHARED, symmetric=True),
    "groups": TileLoss("softmax", NORMALISED, normalise=True),
    "groups of -1": TileLoss("softmax", GROUPS),
    "groups of -3": TileLoss("softmax", replace(GROUPS, negative_target=-3.0)),
    "untargeted": TileLoss("softmax", Pairs(), symmetric=True),
    **{name: TileLoss("softmax", Pairs(dense=targets)) for name, targets in DENSE.items()},
    "sigmoid": TileLoss("sigmoid", GROUPS),
    "sigmoid, unsure": TileLoss("sigmoid", Pairs(dense=UNSURE)),
    "sigmoid, weighed": TileLoss("sigmoid", GROUPS, positive_weights=torch.linspace(1, 1e3, N)),
    "sigmoid, light": TileLoss("sigmoid", GROUPS, positive_weights=torch.linspace(0.01, 0.1, N)),
    "squared_error": TileLoss("squared_error", GROUPS),
    "squared_error, shifted": TileLoss("squared_error", SHIFTED),
    "squared_error, factors": TileLoss("squared_error", Pairs(factors=FACTORS)),
    "distillation": TileLoss("distillation", Pairs(dense=DENSE["shares"]), positive_scale=50.0),
    "multi_similarity": TileLoss("multi_similarity", GROUPS, positive_scale=2.0, base=0.5),
    "multi_positive": TileLoss("multi_positive", GROUPS),
    "circle": TileLoss("circle", GROUPS, margin=0.4),
    "decoupled": TileLoss("decoupled", DIAGONAL),
    "debiased": TileLoss("debiased", OWN, hardness=0.5),
    # Most negatives are positives: what is left of the others has a large weight.
    "debiased, priors": TileLoss(
        "debiased", OWN, hardness=0.5, prior=torch.tensor([[0.95, M - 1.0]]).expand(N, 2)
    ),
    "debiased, small priors": TileLoss(
        "debiased", OWN, prior=torch.tensor([[0.01, M - 1.0]]).expand(N, 2)
    ),
    "levels": TileLoss("levels", GROUPS, levels=torch.tensor([-1.0, 1.0], dtype=torch.float64)),
}
ROWS = {
    "any": lambda n: torch.nn.functional.normalize(torch.randn(n, 4, dtype=torch.float64)),
    "equal": lambda n: torch.nn.functional.normalize(torch.ones(n, 4, dtype=torch.float64)),
    "opposite": lambda n: torch.tensor(
        [[1.0, 0, 0, 0], [-1.0, 0, 0, 0]], dtype=torch.float64
    ).repeat(n, 1)[:n],
}


def loss_scale(tile, weights, columns, coefficients=None):
    return get("triton").loss_scale(tile, weights, torch.bfloat16, columns, coefficients)


def score_grads(tile, x, y, weights):
    """(dL/dS in float64, the coefficients)."""
    backend, tile = TorchBackend(), replace(tile, scale=tile.scale.item())
    coefficients = tile.coefficients(backend.forward(tile, x, y), weights)
    block, workspace = (slice(0, len(x)), slice(0, len(y))), backend.workspace(x, y)
    return backend.score_grad(tile, x, y, block, coefficients, workspace), coefficients


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0, 1000.0])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TILES)
def test_no_score_gradient_overflows(name, rows, scale):
    """By the bound from the weights, and by that from the coefficients; weights of any sign.

    Each bound is tried by itself too: a loss scale leaves room for one that is too small.
    """
    tile = replace(TILES[name], scale=torch.tensor(scale, dtype=torch.float64))
    if rows == "equal" and name == "symmetric":
        tile = replace(tile, margin=1.0)
    x, y = ROWS[rows](N), ROWS[rows](M)
    shape = tile.loss_shape(N, M)
    # A score that is computed again may exceed the maximum by a rounding, times the scale.
    rounding = 1 + 4 * (1 + scale) * torch.finfo(torch.float64).eps
    for weights in (torch.ones(shape), torch.rand(shape), 1e6 * torch.randn(shape)):
        weights = weights.double()
        found, coefficients = score_grads(tile, x, y, weights)
        by_state = loss_scale(tile, None, M, coefficients)
        assert found.abs().max() * by_state <= HALF.max
        assert found.abs().max() * loss_scale(tile, weights, M) <= HALF.max
        assert by_state.log2() == by_state.log2().round()
        of_weights = tile.record.largest_score_grad(tile, weights.abs(), M)
        for bound in (of_weights, tile.record.largest_of(tile, coefficients, M)):
            assert found.abs().max() <= bound * rounding


@pytest.mark.parametrize("name", TILES)
def test_coefficients_are_scaled_as_the_losses_are(name):
    tile = replace(TILES[name], scale=torch.tensor(3.0, dtype=torch.float64))
    x, y = ROWS["any"](N), ROWS["any"](M)
    weights = torch.randn(tile.loss_shape(N, M), dtype=torch.float64)
    _, coefficients = score_grads(tile, x, y, weights)
    _, wanted = score_grads(tile, x, y, 4 * weights)
    torch.testing.assert_close(
        [c for c in tile.record.scaled(coefficients, torch.tensor(4.0)) if c is not None],
        [c for c in wanted if c is not None],
        rtol=0,
        atol=0,
    )


def test_a_matrix_of_many_pairs():
    """cosent_matrix of a million rows and columns, by its state alone: a typical negative is far
    below the largest share.
    """
    top = torch.tensor([[0.6, 1.0], [0.6, -0.5]], dtype=torch.float64)
    # Of negatives with scores around 0 and up to 0.6, of positives around 0.7 and from 0.5 on.
    scale, of_pairs = 20.0, torch.tensor([MANY * (MANY - 1.0), float(MANY)], dtype=torch.float64)
    means = torch.tensor([0.0, 0.7], dtype=torch.float64)
    total = of_pairs * (scale * (torch.stack([means, -means]) - top)).exp()
    levels = torch.tensor([0.0, 1.0], dtype=torch.float64)
    tile = TileLoss("levels", Pairs(), torch.tensor(scale), levels=levels)
    coefficients = tile.coefficients([top, total], 1.0)
    power = loss_scale(tile, None, MANY, coefficients)
    high, up, low, down = tile.record.scaled(coefficients, power)
    typical = up * (scale * (means - high)).exp() - down * (scale * (-means - low)).exp()
    assert typical.abs().min() >= HALF.smallest_normal
    assert max(up[0], down[1]) <= HALF.max
    assert (typical / power * loss_scale(tile, None, MANY)).half()[0] == 0  # without the state


def test_targets_that_are_shares_of_many_columns():
    """Rows of a dense target that add up to 1, most of them on one column."""
    targets = torch.full((2, MANY), 0.1 / MANY)
    targets[:, 0] = 0.9
    tile = TileLoss("softmax", Pairs(dense=targets), torch.tensor(1.0))
    found = 0.9 / MANY * loss_scale(tile, torch.ones(2), MANY)  # p - t of a column
    assert found >= HALF.smallest_normal
    assert (1 + 0.9) * loss_scale(tile, torch.ones(2), MANY) <= HALF.max


def test_targets_of_a_part_of_the_columns():
    """What the targets of the other columns add up to is not known."""
    part = Pairs(dense=torch.full((2, MANY), 2.0)).of_columns(slice(0, 10))
    tile = TileLoss("softmax", part, torch.tensor(1.0))
    assert 2 * MANY * loss_scale(tile, torch.ones(2), MANY) <= HALF.max


def test_groups_of_few_among_many_columns():
    groups = torch.arange(MANY) // 2
    tile = TileLoss(
        "multi_positive", Pairs(row_groups=groups, column_groups=groups), torch.tensor(1.0)
    )
    found = loss_scale(tile, torch.ones(MANY), MANY)
    assert found / MANY >= HALF.smallest_normal
    assert 2 * found <= HALF.max
    # Of few rows that have many positives.
    few = Pairs(row_groups=torch.zeros(2).long(), column_groups=torch.zeros(MANY).long())
    assert loss_scale(replace(tile, pairs=few), torch.ones(2), MANY) * MANY <= HALF.max
    # Of columns that are a part of all, the groups are not known.
    part = replace(tile, pairs=tile.pairs.of_columns(slice(0, 10)))
    assert loss_scale(part, torch.ones(MANY), MANY) * MANY <= HALF.max


def test_positives_that_are_known_to_differ_are_not_counted():
    weights, scale = torch.rand(N), torch.tensor(3.0)
    tile = replace(TILES["symmetric"], scale=scale)
    assert tile.record.largest_score_grad(tile, weights, M) == 3 * weights.amax()


def test_targets_that_are_normalised_are_not_counted():
    weights = torch.rand(N)
    tile = replace(TILES["groups"], scale=torch.tensor(3.0))
    assert tile.record.largest_score_grad(tile, weights, M) == 3 * weights.amax()


@pytest.mark.parametrize("distinct", [True, False])
def test_positives_are_added_up_where_two_may_be_one(distinct, monkeypatch):
    asked, put = [], torch.Tensor.index_put_

    def index_put_(self, indices, values, accumulate=False):
        asked.append(accumulate)
        return put(self, indices, values, accumulate)

    tile = replace(TILES["symmetric"], scale=3.0, pairs=replace(DIAGONAL, distinct=distinct))
    x, y = ROWS["any"](N), ROWS["any"](M)
    state, weights = TorchBackend().forward(tile, x, y), torch.rand(N, dtype=torch.float64)
    wanted = replace(tile, pairs=SHARED).coefficients(state, weights)
    monkeypatch.setattr(torch.Tensor, "index_put_", index_put_)
    found = tile.coefficients(state, weights)
    assert asked == [not distinct]
    torch.testing.assert_close(found[4] * state[5], torch.cat([weights * 1.5, torch.zeros(M - N)]))
    assert not torch.equal(found[4], wanted[4])


def test_the_largest_target_of_groups_and_cosines_is_1():
    cosines = Factors(FACTORS.rows / 100, FACTORS.columns / 100, cosine=True)
    for pairs in (DIAGONAL, GROUPS, NORMALISED, Pairs(factors=cosines)):
        assert largest_target(pairs) == 1


@pytest.mark.parametrize("piece", [1, 2 * M + 1])
def test_targets_are_added_up_in_pieces(piece, monkeypatch):
    """Also where a piece is not even a row."""
    tile = TileLoss("softmax", Pairs(dense=torch.randint(-9, 9, (N, M))), torch.tensor(3.0))
    weights = torch.rand(N)
    whole = tile.record.largest_score_grad(tile, weights, M)
    monkeypatch.setattr("fastsim.kinds.softmax.PIECE", piece)
    assert tile.record.largest_score_grad(tile, weights, M) == whole


def test_the_largest_of_nothing_is_0():
    assert largest(torch.empty(0)) == 0
    assert largest(torch.tensor([1.0, torch.nan])).isnan()


@pytest.fixture
def half(monkeypatch, small_panels):
    """float16 operands on a CPU, a panel at a time; yields the panels of score gradients."""
    found, score_grad = [], TorchBackend.score_grad

    def noted(*given):
        found.append(score_grad(*given).clone())
        return found[-1]

    monkeypatch.setattr(panels, "half_products", lambda *_: True)
    monkeypatch.setattr(TorchBackend, "number", Backend.number)
    monkeypatch.setattr(TorchBackend, "score_grad", noted)
    monkeypatch.setattr(TorchBackend, "serves_one_call", lambda *_: False)
    return found


LOSSES = {
    "cosent_matrix": lambda x, y: fastsim.cosent_matrix(x, y, None, scale=1.0, backend="torch"),
    "symmetric": lambda x, y: fastsim.info_nce(x, y, symmetric=True, backend="torch"),
    "of each row": lambda x, y: fastsim.info_nce(x, y, reduction="none", backend="torch").mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_score_gradients_fill_the_range(name, half):
    """In two passes, and from a state that was kept."""
    x, y = (torch.randn(90, 8).bfloat16().requires_grad_() for _ in "xy")
    LOSSES[name](x, y).backward()
    largest_of_all = max(panel.abs().max() for panel in half)
    assert half[0].dtype == torch.float16
    assert 2.0**10 <= largest_of_all <= HALF.max


def test_ranks_have_one_loss_scale(monkeypatch):
    """The least of theirs, also of one that has no rows."""
    asked = []

    def all_reduce_min(mine, group):
        asked.append((mine, group))
        return mine / 8

    monkeypatch.setattr(scoring, "all_reduce_min", all_reduce_min)
    scale = torch.tensor(3.0)
    for rows in (N, 0):
        one = Call.__new__(Call)
        one.x, one.y = torch.empty(rows, 4).bfloat16(), torch.empty(M, 4).bfloat16()
        one.backend = get("triton")
        pairs = Pairs(torch.arange(rows))
        one.tile = TileLoss("softmax", pairs, scale, symmetric=True, group="ranks")
        monkeypatch.setattr("fastsim.kinds.softmax.all_reduce_sum", lambda mine, group: mine)
        state = [torch.ones(n, dtype=torch.float64) for n in (rows,) * 4 + (M,) * 2]
        weights = torch.ones(rows)
        found, factor = one.coefficients(state, weights, torch.float32)
        mine, group = asked.pop()
        assert group == "ranks"
        assert factor == 8 / mine
        torch.testing.assert_close(found[2], torch.full((rows,), 3.0) * mine / 8)


def test_every_kind_names_its_weights():
    for kind in KINDS.values():
        if kind.in_panels:
            assert {*kind.weights_at} <= {*range(len(kind.coefficient_axes))}
