"""Drop-in losses of sentence-transformers: pairs, lists of scores, triplets.

Value and gradient over the grid of their arguments; truth: tests/sentence_transformers_peer.py.
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
    SHARED,
    WIDTH,
    Given,
    features,
    run,
    same,
    scaled,
    vectors,
)

# ---- lists of scores, pairs, triplets ----


@pytest.mark.parametrize("scale", [20.0, 1.0])
def test_cosent(scale):
    for labels in (torch.rand(ROWS), torch.randint(0, 4, (ROWS,)), torch.rand(ROWS) > 0.5):
        columns = scaled(vectors(2))
        same("CoSENTLoss", {"scale": scale}, columns, labels)
        same("AnglELoss", {"scale": scale}, columns, labels)
    euclidean = {"scale": scale, "similarity_fct": util.pairwise_euclidean_sim}
    same("CoSENTLoss", euclidean, vectors(2), torch.rand(ROWS))


def test_angle_of_tuples_and_odd_width():
    same("AnglELoss", {}, vectors(4))
    same("AnglELoss", {}, vectors(3), torch.rand(ROWS))
    same("AnglELoss", {}, vectors(2, width=9), torch.rand(ROWS))
    with pytest.raises(ValueError, match="requires labels"):
        ours.AnglELoss(Given())(features(vectors(2)), None)


def test_wrong_labels_are_refused_in_their_words():
    columns, labels = vectors(2), torch.rand(ROWS - 1)
    for name in ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"):
        for package in (ours, theirs):
            with pytest.raises(ValueError, match=f"{name} expects {ROWS} labels"):
                getattr(package, name)(Given())(features(columns), labels)


@pytest.mark.parametrize("loss_fct", [torch.nn.MSELoss(), torch.nn.L1Loss()])
@pytest.mark.parametrize("transformation", [torch.nn.Identity(), torch.nn.Sigmoid()])
def test_cosine_similarity(loss_fct, transformation):
    options = {"loss_fct": loss_fct, "cos_score_transformation": transformation}
    same("CosineSimilarityLoss", options, scaled(vectors(2)), torch.rand(ROWS))


def test_softmax():
    kinds = [flags for flags in itertools.product((True, False), repeat=3) if any(flags)]
    names = [f"concatenation_sent_{part}" for part in ("rep", "difference", "multiplication")]
    for flags in kinds:
        options = {"embedding_dimension": WIDTH, "num_labels": 3}
        options |= dict(zip(names, flags, strict=True))
        same("SoftmaxLoss", options, vectors(2), torch.randint(0, 3, (ROWS,)))
        same("SoftmaxLoss", options, vectors(2), torch.rand(ROWS, 3).softmax(1))
    loss = ours.SoftmaxLoss(Given(), WIDTH, 3)
    columns = vectors(2)
    embeddings, logits = loss(features(columns), None)
    assert torch.equal(embeddings[0], columns[0])
    assert logits.shape == (ROWS, 3)


@pytest.mark.parametrize("metric", ["COSINE", "EUCLIDEAN", "MANHATTAN"])
def test_triplet(metric):
    metric = getattr(theirs.TripletDistanceMetric, metric)
    for margin in (5.0, 0.1):
        same("TripletLoss", {"distance_metric": metric, "triplet_margin": margin}, vectors(3))


def test_triplet_of_a_metric_of_its_own(monkeypatch):
    monkeypatch.setattr("fastsim.integrations.sentence_transformers.fused._said", set())

    def metric(x, y):
        return (x - y).square().sum(1)

    with pytest.warns(UserWarning, match="distance_metric has no fused form"):
        same("TripletLoss", {"distance_metric": metric}, vectors(3))


def test_triplet_of_equal_texts():
    """At Euclidean distance 0 the gradient of that distance is 0, not NaN."""
    anchors, _, negatives = vectors(3)
    same("TripletLoss", {}, [anchors, anchors.clone(), negatives])


# ---- triplets of classes ----

BATCH = [name for name in SHARED if name.startswith("Batch")]
METRIC = theirs.BatchHardTripletLossDistanceFunction
METRICS = [METRIC.euclidean_distance, METRIC.cosine_distance]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("name", BATCH)
def test_batch_triplets(name, metric, monkeypatch):
    from fastsim.engine import triplets

    monkeypatch.setattr(triplets, "BAND", 100)
    margins = (5.0, 0.3) if "Soft" not in name else (None,)
    for margin, classes in itertools.product(margins, (2, 5, 12)):
        options = {"distance_metric": metric} | ({} if margin is None else {"margin": margin})
        columns = vectors(1)
        labels = torch.cat([torch.arange(2), torch.randint(0, classes, (ROWS - 2,))])
        same(name, options, columns, labels)
        same(name, options, columns, labels.double())


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_of_one_class_teaches_nothing(name):
    labels = torch.zeros(ROWS, dtype=torch.int64)
    for metric in METRICS:
        loss = getattr(ours, name)(Given(), distance_metric=metric)
        value, grad = run(loss, vectors(1), labels, torch.float32)
        assert value == 0
        assert not grad.any()


def test_one_class_by_the_peer():
    """What `test_a_batch_of_one_class_teaches_nothing` differs from: a pull, or a constant."""
    labels = torch.zeros(ROWS, dtype=torch.int64)
    value, grad = run(theirs.BatchSemiHardTripletLoss(Given()), vectors(1), labels, torch.float32)
    assert value > 0
    assert grad.any()


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
