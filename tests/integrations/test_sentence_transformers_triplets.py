"""Drop-in losses of sentence-transformers: triplets of the classes of a batch.

Value and gradient over the grid of their arguments; truth: sentence_transformers_peer.py beside it.
"""

import itertools

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from tests.integrations.sentence_transformers_peer import (
    ROWS,
    SHARED,
    WIDTH,
    Given,
    features,
    run,
    same,
    vectors,
)

BATCH = [name for name in SHARED if name.startswith("Batch")]
METRIC = theirs.BatchHardTripletLossDistanceFunction
METRICS = [METRIC.euclidean_distance, METRIC.cosine_distance]


def clear(rows, labels, metric):
    """Whether rounding in float32 decides nowhere if a negative is farther than a positive."""
    distances, alike = metric(rows), labels[:, None] == labels
    gaps = (distances[:, :, None] - distances[:, None])[alike[:, :, None] & ~alike[:, None]]
    largest = max(1.0, *rows.norm(dim=1).tolist())
    return gaps.abs().min() > 8 * torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("name", BATCH)
def test_batch_triplets(name, metric, monkeypatch):
    from fastsim.engine import triplets

    monkeypatch.setattr(triplets, "BAND", 100)
    margins = (5.0, 0.3) if "Soft" not in name else (None,)
    for margin, classes in itertools.product(margins, (2, 5, 12)):
        options = {"distance_metric": metric} | ({} if margin is None else {"margin": margin})
        while True:
            columns = vectors(1)
            labels = torch.cat([torch.arange(2), torch.randint(0, classes, (ROWS - 2,))])
            if clear(columns[0].double(), labels, metric):
                break
        same(name, options, columns, labels)
        same(name, options, columns, labels.double() / 4)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("name", BATCH)
def test_a_batch_of_one_class(name, rows, metric):
    columns, labels = vectors(1, rows), torch.zeros(rows, dtype=torch.int64)
    same(name, {"distance_metric": metric}, columns, labels)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("name", [name for name in BATCH if "Hard" in name])
def test_a_nan_or_inf_reaches_the_loss(name, rows, metric, bad):
    (column,), labels = vectors(1, rows), torch.randint(0, 3, (rows,))
    column[rows // 2, 1] = bad
    loss = getattr(ours, name)(Given(), distance_metric=metric)
    assert loss(features([column]), labels).isnan()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("name", BATCH)
def test_a_zero_row_in_a_batch_of_one_class(name, rows, metric):
    """Its cosine distance is 1, from itself too."""
    columns, labels = vectors(1, rows), torch.zeros(rows, dtype=torch.int64)
    columns[0][0] = 0.0
    ours_, theirs_ = (
        getattr(package, name)(Given(), distance_metric=metric)(features(columns), labels)
        for package in (ours, theirs)
    )
    torch.testing.assert_close(ours_, theirs_)


@pytest.mark.parametrize("name", BATCH)
def test_the_gradient_of_a_zero_row(name):
    """In the direction of its partners, divided by a norm of 1e-12, there; 0 here."""
    columns, labels = vectors(1), torch.arange(ROWS) % 3
    columns[0][0] = 0.0
    found, wanted = (
        run(
            getattr(package, name)(Given(), distance_metric=METRIC.cosine_distance),
            columns,
            labels,
            torch.float64,
        )
        for package in (ours, theirs)
    )
    torch.testing.assert_close([found[0], found[1][1:]], [wanted[0], wanted[1][1:]])
    assert (found[1][0] == 0).all()
    assert wanted[1][0].abs().max() > 1e9


@pytest.mark.parametrize("name", BATCH)
def test_further_columns_are_ignored(name):
    columns, labels = vectors(3), torch.arange(ROWS) % 3
    losses = [getattr(package, name)(Given()) for package in (ours, theirs)]
    values = [loss(features(columns), labels) for loss in losses]
    torch.testing.assert_close(*values)
    values = [loss.compute_loss_from_embeddings(columns, labels) for loss in losses]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("name", ["BatchSemiHardTripletLoss", "BatchAllTripletLoss"])
def test_batch_losses_of_a_margin_that_is_a_tensor(name, monkeypatch):
    monkeypatch.setattr("fastsim.integrations.overrides._warned", set())
    columns, labels = vectors(1), torch.arange(ROWS) % 3
    value, wanted = (
        getattr(package, name)(Given(), margin=torch.tensor(0.5))(features(columns), labels)
        for package in (ours, theirs)
    )
    torch.testing.assert_close(value, wanted)
    learnt = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.warns(UserWarning, match="margin has no fused form"):
        loss = getattr(ours, name)(Given(), margin=learnt)(features(columns), labels)
    assert torch.autograd.grad(loss, learnt)[0] > 0


HOOKS = {
    "BatchHardTripletLoss": "batch_hard_triplet_loss",
    "BatchHardSoftMarginTripletLoss": "batch_hard_triplet_soft_margin_loss",
    "BatchSemiHardTripletLoss": "batch_semi_hard_triplet_loss",
    "BatchAllTripletLoss": "batch_all_triplet_loss",
}


@pytest.mark.parametrize("how", ["object", "subclass"])
@pytest.mark.parametrize("name", BATCH)
def test_batch_losses_run_what_was_replaced(name, how, monkeypatch):
    monkeypatch.setattr("fastsim.integrations.overrides._warned", set())
    columns, labels = vectors(1), torch.arange(ROWS) % 3
    kind, hook = getattr(ours, name), HOOKS[name]

    def replacement(*given):
        labels, embeddings = given[-2:]
        return embeddings.sum() + labels.sum()

    if how == "subclass":
        kind = type(name, (kind,), {hook: replacement})
    loss = kind(Given())
    if how == "object":
        setattr(loss, hook, replacement)
    with pytest.warns(UserWarning, match=f"{name}: {hook} has been replaced"):
        assert loss(features(columns), labels) == columns[0].sum() + labels.sum()
    loss(features(columns), labels)  # a second note would be an error


@pytest.mark.parametrize("name", BATCH)
def test_state_dicts_load_both_ways(name):
    mine, peer, other = (
        getattr(package, name)(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
        for package in (ours, theirs, ours)
    )
    state = mine.state_dict()
    assert list(state) == list(peer.state_dict())
    assert list(state._metadata) == list(peer.state_dict()._metadata)
    peer.load_state_dict(state)
    other.load_state_dict(peer.state_dict())
    for loaded in (peer.sentence_embedder, other.model):
        assert torch.equal(loaded[0].weight, mine.model[0].weight)
    earlier = {f"model.{key}": value for key, value in mine.model.state_dict().items()}
    assert not other.load_state_dict(earlier).unexpected_keys
    wrapped = [torch.nn.ModuleDict({"a": loss}) for loss in (mine, peer)]
    assert list(wrapped[0].state_dict()) == list(wrapped[1].state_dict())
    wrapped[0].load_state_dict(wrapped[1].state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        mine.load_state_dict(state | {"other": torch.zeros(1)})


@pytest.mark.parametrize("name", BATCH)
def test_equal_embeddings_of_a_class(name):
    """Distance 0 between positives: every gradient finite."""
    column, labels = torch.randn(ROWS, WIDTH), torch.arange(ROWS) // 4
    column[:8] = column[0]
    loss = getattr(ours, name)(Given())
    assert all(part.isfinite().all() for part in run(loss, [column], labels, torch.float32))


@pytest.mark.parametrize("name", BATCH)
def test_distances_far_from_the_origin(name):
    """|x|^2 - 2 x.y + |y|^2 loses them all in float32; ours takes them between centred rows."""
    columns, labels = [100 + 0.01 * torch.randn(ROWS, 64)], torch.arange(ROWS) % 4
    truth = run(getattr(theirs, name)(Given()), columns, labels, torch.float64)
    errors = []
    for package in (ours, theirs):
        got = run(getattr(package, name)(Given()), columns, labels, torch.float32)[1]
        errors.append(((got - truth[1]).norm() / truth[1].norm()).item())
    assert errors[0] < 0.01 < 0.2 < errors[1]


@pytest.mark.parametrize("name", BATCH)
def test_the_model_is_found_by_a_trainer(name):
    """Under `model`, so that a wrapper for several devices takes its place."""
    loss = getattr(ours, name)(Given())
    assert [child for child, _ in loss.named_children()] == ["model"]
    other = Given()
    loss.model = other
    assert loss.sentence_embedder is other
    loss.sentence_embedder = Given()
    assert loss.model is loss.sentence_embedder is not other
    assert "model" not in dict(getattr(theirs, name)(Given()).named_children())
