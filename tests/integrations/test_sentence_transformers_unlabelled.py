"""Drop-in losses of texts alone: spread-out regularization, and contrastive tension in a batch.

Value and gradient over the grid of their arguments; truth: sentence_transformers_peer.py beside it.
"""

import itertools

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from tests.integrations.sentence_transformers_peer import (
    ROWS,
    RUNS,
    WIDTH,
    Given,
    Guided,
    features,
    hold,
    run,
    scaled,
    vectors,
)

# ---- spread-out regularization ----

WEIGHTS = [{}, {"mean_weight": None}, {"mean_weight": 0.7, "second_moment_weight": 0.0}]


def slope(column):
    """The largest term of a gradient: of a moment, by an embedding of this length."""
    lengths = column.double().norm(dim=1)
    units = column.double() / lengths[:, None]
    most = torch.linalg.matrix_norm(units, ord=2).item() ** 2  # of the Gram matrix
    return 4 * (most + 1) / (len(column) * (len(column) - 1) * lengths.min().item())


@pytest.mark.parametrize("rows", [2, WIDTH, WIDTH + 1, 5 * ROWS])
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_spread_out(shift, rows):
    """On both sides of a square batch; rows that lean to one side have large moments."""
    for options, aggregation in itertools.product(WEIGHTS, ("mean", "sum")):
        columns = scaled([column + shift for column in vectors(3, rows)])
        options = options | {"aggregation": aggregation}
        name = "GlobalOrthogonalRegularizationLoss"
        runs = [
            run(getattr(package, name)(Given(), **options), columns, None, dtype)
            for package, dtype in RUNS
        ]
        hold(f"{options}", runs, size=len(columns), term=max(map(slope, columns)))


def test_one_row_has_no_pair():
    for rows in (0, 1):
        loss = ours.GlobalOrthogonalRegularizationLoss(Given())
        column = torch.randn(rows, WIDTH, requires_grad=True)
        found = loss(features([column]))
        assert list(found) == ["gor_mean", "gor_second_moment"]
        assert not any(term.item() for term in found.values())
        sum(found.values()).backward()
        assert not column.grad.any()


def test_a_column_without_its_cosines(monkeypatch):
    """Of more rows than dimensions none of the matrices has N x N numbers."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            seen.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    column = torch.randn(50 * WIDTH, WIDTH)
    with Watch():
        ours.GlobalOrthogonalRegularizationLoss(Given())(features([column]))
    assert max(seen) == column.numel()


def test_spread_out_of_products_is_theirs():
    columns = vectors(2)
    mine, peer = (
        package.GlobalOrthogonalRegularizationLoss(Given(), similarity_fct=util.dot_score)
        for package in (ours, theirs)
    )
    with pytest.warns(UserWarning, match="Loss: similarity_fct has no fused form"):
        found = mine(features(columns))
    assert found == peer(features(columns))


def test_a_patch_of_their_terms_runs(monkeypatch):
    name = "GlobalOrthogonalRegularizationLoss"
    kind, columns = getattr(theirs, name), vectors(2)
    monkeypatch.setattr(kind, "compute_gor", lambda self, column: (column.sum(), column.sum()))
    with pytest.warns(UserWarning, match=f"{name}: compute_gor has been replaced"):
        found = getattr(ours, name)(Given())(features(columns))
    assert found == kind(Given())(features(columns))


# ---- contrastive tension ----


def of_two(columns):
    """One column of texts, as two encoders see it."""
    return [{"embeddings": columns[0], "guide": columns[1]}]


def tension(package, **options):
    loss = package.ContrastiveTensionLossInBatchNegatives(Given(), **options)
    loss.model1 = Guided()
    return loss


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("options", [{}, {"scale": 3.0, "similarity_fct": util.dot_score}])
def test_contrastive_tension(options, rows):
    """The gradient of its learnt scale too."""
    columns = scaled(vectors(2, rows))
    runs = [run(tension(package, **options), columns, None, d, of_two) for package, d in RUNS]
    shortest = min(column.norm(dim=1).min().item() for column in columns)
    size = options.get("scale", 20.0)
    if options:
        size *= max(column.norm(dim=1).max().item() for column in columns) ** 2
    hold(f"{options}", runs, size, term=1 / (rows * shortest))
    assert len(runs[0]) == 4


REPLACED = {
    "similarity_fct": util.euclidean_sim,
    "cross_entropy_loss": torch.nn.CrossEntropyLoss(label_smoothing=0.1),
}


@pytest.mark.parametrize("name", REPLACED)
def test_contrastive_tension_that_is_theirs(name):
    columns, losses = vectors(2), [tension(package) for package in (ours, theirs)]
    for loss in losses:
        setattr(loss, name, REPLACED[name])
    with pytest.warns(UserWarning, match=f"Negatives: {name} has "):
        value = losses[0](of_two(columns), None)
    assert torch.equal(value, losses[1](of_two(columns), None))


def test_contrastive_tension_of_no_rows():
    columns = [torch.zeros(0, WIDTH)] * 2
    values = [tension(package)(of_two(columns), None) for package in (ours, theirs)]
    torch.testing.assert_close(*values, equal_nan=True)
