"""Drop-in losses of sentence-transformers: pairs, lists of scores, triplets.

Value and gradient over the grid of their arguments; truth: sentence_transformers_peer.py beside it.
"""

import contextlib
import copy
import itertools

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from fastsim.integrations.sentence_transformers import distillation
from tests.integrations.sentence_transformers_peer import (
    ROWS,
    WIDTH,
    Given,
    features,
    same,
    scaled,
    vectors,
)

# ---- lists of scores, pairs, triplets ----


@pytest.mark.parametrize("scale", [20.0, 1.0, 2 * torch.ones(1)])
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


SCALES = [-20.0, 0.0, float("inf"), torch.tensor(-2.0)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["CoSENTLoss", "AnglELoss"])
def test_a_scale_that_is_no_positive_number_is_theirs(name, scale):
    columns, labels = vectors(2), torch.rand(ROWS)
    loss, peer = (getattr(package, name)(Given(), scale=scale) for package in (ours, theirs))
    with pytest.warns(UserWarning, match=f"{name}: scale has no fused form"):
        value = loss(features(columns), labels)
    wanted = peer(features(columns), labels)
    torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)
    loss(features(columns), labels)  # a second note would be an error


def test_a_learnt_scale_that_crosses_0():
    columns, labels = vectors(2), torch.rand(ROWS)
    scale = torch.nn.Parameter(torch.tensor(0.5))
    loss = ours.CoSENTLoss(Given(), scale=scale)
    loss(features(columns), labels)
    with torch.no_grad():
        scale.fill_(-0.5)
    with pytest.warns(UserWarning, match="scale has no fused form"):
        value = loss(features(columns), labels)
    assert torch.equal(value, theirs.CoSENTLoss(Given(), scale=-0.5)(features(columns), labels))
    assert torch.autograd.grad(value, scale)[0].isfinite()


@pytest.mark.parametrize("name", ["CoSENTLoss", "AnglELoss"])
def test_labels_that_are_nan(name):
    """A search among them there, by which pairs of numbers get lost; refused here."""
    columns, labels = vectors(2), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, torch.nan, torch.nan])
    columns = [column[: len(labels)] for column in columns]
    place = torch.searchsorted(labels, labels, right=True)[3]
    assert place > 4  # as if nothing were above 0.4
    assert getattr(theirs, name)(Given())(features(columns), labels).isfinite()
    with pytest.raises(ValueError, match="labels: wanted labels that can be ordered, got NaN"):
        getattr(ours, name)(Given())(features(columns), labels)


def test_wrong_labels_are_refused_in_their_words():
    columns, labels = vectors(2), torch.rand(ROWS - 1)
    for name in ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"):
        for package in (ours, theirs):
            with pytest.raises(ValueError, match=f"{name} expects {ROWS} labels"):
                getattr(package, name)(Given())(features(columns), labels)


def test_scores_of_another_shape_are_refused_in_their_words():
    def scores(u, v):
        return (u * v).sum(1, keepdim=True)

    for package in (ours, theirs):
        loss = package.CoSENTLoss(Given(), similarity_fct=scores)
        with pytest.raises(ValueError, match="Labels and scores must have the same shape, got"):
            loss(features(vectors(2)), torch.rand(ROWS))


@pytest.mark.parametrize("loss_fct", [torch.nn.MSELoss(), torch.nn.L1Loss()])
@pytest.mark.parametrize("transformation", [torch.nn.Identity(), torch.nn.Sigmoid()])
def test_cosine_similarity(loss_fct, transformation):
    options = {"loss_fct": loss_fct, "cos_score_transformation": transformation}
    same("CosineSimilarityLoss", options, scaled(vectors(2)), torch.rand(ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformation_with_parameters(dtype):
    """It meets what it meets there, of the dtype of its own parameters."""
    columns = [column.to(dtype) for column in scaled(vectors(2))]
    labels = torch.rand(ROWS)
    found = []
    for package, kind in ((ours, dtype), (theirs, dtype), (theirs, torch.float64)):
        options = {"cos_score_transformation": torch.nn.PReLU(1)}
        loss = package.CosineSimilarityLoss(Given(), **options).to(kind)
        found.append(loss(features([column.to(kind) for column in columns]), labels))
        found[-1].backward()
        assert loss.cos_score_transformation.weight.grad.isfinite().all()
    mine, peer, truth = found
    assert mine.dtype == peer.dtype
    # A cosine of at most 1 is rounded to the dtype, once by us, and the transformed one again;
    # the derivative of the mean of squares is at most 2 (1 + 1).
    assert abs(mine - truth) <= 2 * 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_of_a_transformation_of_16_bits(dtype):
    """They stay what they are: of cosines that are 1 the loss is exact."""
    column, label = torch.eye(4, dtype=dtype), torch.full((4,), 1 / 3)
    options = {"cos_score_transformation": torch.nn.PReLU(1), "loss_fct": torch.nn.L1Loss()}
    loss, wanted = (
        package.CosineSimilarityLoss(Given(), **options).to(dtype)(features([column] * 2), label)
        for package in (ours, theirs)
    )
    assert loss.dtype == wanted.dtype
    torch.testing.assert_close(loss, 1 - label[0], rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def classified(package, columns, labels, dtype, weights, autocast=False, **options):
    """(what SoftmaxLoss gives, the gradient of its classifier)."""
    torch.manual_seed(5)
    loss = package.SoftmaxLoss(Given(), WIDTH, 3, concatenation_sent_multiplication=True, **options)
    loss = loss.to(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(features([column.to(dtype) for column in columns]), labels)
    if labels is None:
        return value[1], None
    value.backward()
    return value.detach(), loss.classifier.weight.grad


LOW = [
    (torch.bfloat16, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, False),
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.float32, True),
]


@pytest.mark.parametrize(("dtype", "weights", "autocast"), LOW)
def test_softmax_in_16_bits(dtype, weights, autocast):
    """Logits of float32, rounded once where theirs are of 16 bits; a weighted loss takes them."""
    columns = [(3 * column).to(dtype) for column in vectors(2, width=WIDTH)]
    labels = torch.randint(0, 3, (ROWS,))
    torch.manual_seed(5)
    layer = torch.nn.Linear(4 * WIDTH, 3).to(weights)
    u, v = (column.double() for column in columns)
    parts = torch.cat([u, v, (u - v).abs(), u * v], 1)
    exact = parts @ layer.weight.double().T + layer.bias.double()
    given = columns, None, dtype, weights, autocast
    logits, peers = (classified(package, *given)[0] for package in (ours, theirs))
    assert logits.dtype == peers.dtype
    # Half a unit of the dtype that is returned, and the sums of 4 WIDTH products in float32.
    terms = (parts.abs() @ layer.weight.double().abs().T).max()
    summed = WIDTH * torch.finfo(torch.float32).eps * terms
    assert (
        (logits - exact).abs() <= torch.finfo(logits.dtype).eps / 2 * exact.abs() + summed
    ).all()
    given = columns, labels, dtype, weights, autocast
    (loss, grad), (wanted, other) = (classified(package, *given) for package in (ours, theirs))
    truth = torch.nn.functional.cross_entropy(exact, labels)
    assert (loss.dtype, grad.dtype) == (wanted.dtype, other.dtype)
    assert abs(loss - truth) <= torch.finfo(loss.dtype).eps * truth + 2 * summed
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    values = [
        classified(package, *given, loss_fct=copy.deepcopy(weighted))[0]
        for package in (ours, theirs)
    ]
    torch.testing.assert_close(*values, rtol=4 * torch.finfo(torch.bfloat16).eps, atol=0)


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
    monkeypatch.setattr("fastsim.integrations.overrides._warned", set())

    def metric(x, y):
        return (x - y).square().sum(1)

    with pytest.warns(UserWarning, match="distance_metric has no fused form"):
        same("TripletLoss", {"distance_metric": metric}, vectors(3))


def test_triplet_of_equal_texts():
    """At Euclidean distance 0 the gradient of that distance is 0, not NaN."""
    anchors, _, negatives = vectors(3)
    same("TripletLoss", {}, [anchors, anchors.clone(), negatives])


# ---- a teacher's scores ----

SCORES = [util.pairwise_cos_sim, util.pairwise_dot_score, util.pairwise_euclidean_sim]


@pytest.mark.parametrize("similarity_fct", SCORES, ids=lambda scores: scores.__name__)
@pytest.mark.parametrize("columns", [3, 5])
def test_distillation(similarity_fct, columns):
    embeddings, scores = scaled(vectors(columns)), torch.rand(ROWS, columns - 1)
    options = {"similarity_fct": similarity_fct}
    for temperatures in (
        {},
        {"temperature": 0.3},
        {"student_temperature": 0.2, "teacher_temperature": 0.5},
    ):
        same("DistillKLDivLoss", options | temperatures, embeddings, scores)
    same("MarginMSELoss", options, embeddings, scores)
    same("MarginMSELoss", options, embeddings, scores[:, :1] - scores[:, 1:])
    if columns == 3:
        same("MarginMSELoss", options, embeddings, scores[:, 0] - scores[:, 1])


@pytest.mark.parametrize("name", ["DistillKLDivLoss", "MarginMSELoss"])
def test_cosines_of_a_teacher_are_fused(name, monkeypatch):
    """Given to the loss or set later, and no cosine of theirs is computed."""

    def refused(rows):
        raise AssertionError("theirs was called")

    kind, scores = getattr(ours, name), torch.rand(ROWS, 2)
    losses = [kind(Given(), util.pairwise_cos_sim), kind(Given())]
    losses[1].similarity_fct = util.pairwise_cos_sim
    assert losses[0].get_config_dict() == losses[1].get_config_dict()
    assert losses[0].get_config_dict()["similarity_fct"] == "pairwise_cos_sim"
    monkeypatch.setattr(util.similarity, "normalize_embeddings", refused)
    columns = vectors(3)
    values = [loss(features(columns), scores) for loss in losses]
    assert torch.equal(*values)
    with pytest.raises(AssertionError, match="theirs was called"):
        getattr(theirs, name)(Given(), util.pairwise_cos_sim)(features(columns), scores)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_cosines_of_rows_that_are_not_alike_are_theirs():
    a, b = vectors(2)
    found = distillation.pairwise_cos_sim(a.to_sparse(), b.to_sparse())
    torch.testing.assert_close(found, util.pairwise_cos_sim(a, b))
    found = distillation.pairwise_cos_sim(a, b[:1])
    torch.testing.assert_close(found, util.pairwise_cos_sim(a, b[:1]))


def test_further_columns_of_pairs():
    """Ignored where theirs ignores them, else refused with what was wanted."""
    columns, labels = vectors(3), torch.rand(ROWS)
    for name in ("CoSENTLoss", "CosineSimilarityLoss"):
        values = [getattr(p, name)(Given())(features(columns), labels) for p in (ours, theirs)]
        torch.testing.assert_close(*values)
    with pytest.raises(ValueError, match="Expected 2 embeddings, got 3"):
        ours.SoftmaxLoss(Given(), WIDTH, 3)(features(columns), labels.long())
    with pytest.raises(ValueError, match="Expected 3 embeddings, got 2"):
        ours.TripletLoss(Given())(features(columns[:2]), None)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def bent(layer):
    layer.register_forward_hook(lambda module, given, out: out * 2)
    return layer


LAYERS = [
    lambda: bent(torch.nn.Linear(3 * WIDTH, 3)),
    lambda: torch.nn.Linear(3 * WIDTH, 3, bias=False),
    lambda: Doubled(3 * WIDTH, 3),
]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_classifier_of_another_kind(layer, monkeypatch):
    monkeypatch.setattr("fastsim.integrations.overrides._warned", set())
    columns, labels, values = vectors(2), torch.randint(0, 3, (ROWS,)), []
    layer = layer()
    for package in (ours, theirs):
        loss = package.SoftmaxLoss(Given(), WIDTH, 3)
        loss.classifier = layer
        said = pytest.warns(UserWarning, match="SoftmaxLoss: classifier has no fused form")
        with said if package is ours else contextlib.nullcontext():
            values.append(loss(features(columns), labels))
    assert torch.equal(*values)


NO_ROWS = ["MultipleNegativesRankingLoss", "CosineSimilarityLoss", "CoSENTLoss", "TripletLoss"]


@pytest.mark.parametrize("name", [*NO_ROWS, "MegaBatchMarginLoss"])
def test_no_rows(name):
    """What theirs gives for an empty batch, or the error that it raises."""
    columns, labels = [torch.zeros(0, WIDTH)] * (3 if name == "TripletLoss" else 2), torch.zeros(0)
    found = []
    for package in (ours, theirs):
        options = {"use_mini_batched_version": False} if name.startswith("Mega") else {}
        try:
            found.append(getattr(package, name)(Given(), **options)(features(columns), labels))
        except Exception as error:
            found.append(type(error))
    if isinstance(found[1], torch.Tensor):
        torch.testing.assert_close(*found, equal_nan=True)
    else:
        assert found[0] == found[1]
