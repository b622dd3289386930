"""Drop-in losses of sentence-transformers: value and gradient over the grid of their arguments.

Truth is sentence-transformers' own loss in float64; the tolerance twice its error in float32, of
which one draw is seen, and what rounding a logit or distance does: eps times its size, to the
exponential of a logit relatively.
"""

import inspect
import itertools

import pytest
import torch

from tests.models import tiny_bert

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from fastsim.integrations.sentence_transformers import mega_batch, ranking

ROWS, WIDTH = 19, 12
DIRECTIONS = [
    ("query_to_doc", *more)
    for size in range(4)
    for more in itertools.combinations(("query_to_query", "doc_to_query", "doc_to_doc"), size)
]
HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
SHARED = [name for name in ours.__all__ if hasattr(theirs, name)]


class Given(torch.nn.Module):
    """Stands in for an encoder: the features hold the embeddings."""

    device = torch.device("cpu")

    def __init__(self, max_seq_length=64):
        super().__init__()
        self.max_seq_length = max_seq_length

    def forward(self, features):
        return {"sentence_embedding": features["embeddings"]}

    def __getitem__(self, index):
        return self

    @property
    def tokenizer(self):
        return tokenizer()


def tokenizer(kept=[]):  # noqa: B006
    import transformers

    if not kept:
        kept.append(transformers.AutoTokenizer.from_pretrained(tiny_bert()))
    return kept[0]


def features(columns):
    return [{"embeddings": column} for column in columns]


def padded(columns):
    """Features that can be cut into mini-batches."""
    return [{"embeddings": c, "input_ids": torch.zeros(len(c), 2)} for c in columns]


def run(loss, columns, labels, dtype, features=features):
    """The loss and the gradients of the columns in a dtype; gradients of parameters after them."""
    loss = loss.to(dtype)
    leaves = [column.detach().to(dtype).requires_grad_() for column in columns]
    if labels is not None and labels.is_floating_point():
        labels = labels.to(dtype)
    value = loss(features(leaves), labels)
    value.backward()
    learnt = [p.grad for p in loss.parameters()]
    return [value.detach(), *(leaf.grad for leaf in leaves), *learnt]


def hold(what, runs, size, term=0.0):
    """Ours as near to the truth as theirs; runs: of ours, theirs in float64, theirs in float32.

    Each is [value, gradients...]; `size`: of the largest logit, or distance. term: the largest of
    those whose sum a gradient is, per unit of logit; where they cancel, their rounding stays.
    """
    for part, (got, truth, dense) in enumerate(zip(*runs, strict=True)):
        error, theirs_ = ((v - truth).abs().max().item() for v in (got.double(), dense.double()))
        largest = max(truth.abs().max().item(), 1.0 if part == 0 else term)
        allowed = 2 * (theirs_ + torch.finfo(torch.float32).eps * size * largest)
        assert error <= allowed, f"{what} part {part}: error {error:.3g}, allowed {allowed:.3g}"


RUNS = ((ours, torch.float32), (theirs, torch.float64), (theirs, torch.float32))


def same(name, options, columns, labels=None, features=features):
    """The loss `name` with `options`, for columns of embeddings."""
    runs = []
    for package, dtype in RUNS:
        with torch.random.fork_rng():
            torch.manual_seed(5)  # of a loss's own weights
            loss = getattr(package, name)(Given(), **options)
        runs.append(run(loss, columns, labels, dtype, features))
    scaled_ = name.endswith("RankingLoss") or name in ("CoSENTLoss", "AnglELoss")
    if scaled_:
        size = options.get("scale", 20.0) + options.get("hardness_strength", 0.0)
        shortest = min(column.norm(dim=1).min().item() for column in columns)
        term = 1 / (len(columns[0]) * shortest)  # a row's share of the mean, along a unit row
    else:  # the largest distance
        size, term = 2 * max(column.norm(dim=1).max().item() for column in columns), 0.0
    hold(f"{name} {options}", runs, size, term)


def vectors(count, rows=ROWS, width=WIDTH):
    return [torch.randn(rows, width) for _ in range(count)]


def scaled(columns):
    """Columns of lengths away from 1, whose normalisation then matters."""
    return [column * torch.rand(len(column), 1).add(0.3) for column in columns]


@pytest.fixture(params=[False, True], ids=["engine", "small"])
def regime(request, monkeypatch):
    """The engine, and the one matrix that a small batch may have."""
    for module in (ranking, mega_batch):
        monkeypatch.setattr(module, "SMALL", 1 << 16 if request.param else 0)


# ---- rankings ----


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("directions", DIRECTIONS, ids="+".join)
def test_ranking(directions, negatives, regime):
    columns = scaled(vectors(2 + negatives))
    modes = ["joint"]
    if not {"query_to_query", "doc_to_doc"} & set(directions):
        modes.append("per_direction")
    for (mode, hardness), scale in zip(
        itertools.product(modes, HARDNESS), itertools.cycle((20.0, 3.0)), strict=False
    ):
        options = {
            "directions": directions,
            "partition_mode": mode,
            "hardness_mode": hardness,
            "hardness_strength": 5.0 if hardness else 0.0,
            "scale": scale,
        }
        same("MultipleNegativesRankingLoss", options, columns)


@pytest.mark.parametrize("rows", [1, 2])
def test_ranking_of_few_rows(rows, regime):
    for directions, negatives in itertools.product(DIRECTIONS, (0, 2)):
        columns = vectors(2 + negatives, rows)
        same("MultipleNegativesRankingLoss", {"directions": directions}, columns)


def test_columns_of_unequal_size_are_refused():
    columns = [*vectors(2), torch.randn(ROWS - 1, WIDTH)]
    loss = ours.MultipleNegativesRankingLoss(Given())
    with pytest.raises(ValueError, match="wanted columns of one shape"):
        loss(features(columns), None)
    with pytest.raises(ValueError, match="Expected at least 2 embeddings, got 1"):
        loss.compute_loss_from_embeddings(columns[:1], None)


def test_zero_rows_and_large_scales_stay_finite(regime):
    columns = vectors(3)
    columns[0][3] = columns[1][3] = columns[2][5] = 0.0
    for hardness in HARDNESS:
        options = {"directions": DIRECTIONS[-1], "scale": 1000.0, "hardness_mode": hardness}
        loss = ours.MultipleNegativesRankingLoss(Given(), **options, hardness_strength=9.0)
        parts = run(loss, columns, None, torch.float32)
        assert all(part.isfinite().all() for part in parts)
        assert not parts[1][3].any()


def test_other_similarities_are_theirs_and_say_so_once(monkeypatch):
    monkeypatch.setattr("fastsim.integrations.sentence_transformers.fused._said", set())
    columns = vectors(3)
    options = {"similarity_fct": util.dot_score, "scale": 1.0}
    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        with pytest.warns(UserWarning, match="similarity_fct has no fused form"):
            loss = getattr(ours, name)(Given(), **options)(features(columns), None)
        peer = getattr(theirs, name)(Given(), **options)(features(columns), None)
        assert torch.equal(loss, peer)
        getattr(ours, name)(Given(), **options)(features(columns), None)  # a second note would fail


def test_learnt_scale(regime):
    """Its gradient is the derivative of the peer's loss by its scale."""
    columns, step = [c.double() for c in scaled(vectors(3))], 1e-5
    for directions, hardness in itertools.product(DIRECTIONS, HARDNESS):
        options = {"directions": directions, "hardness_mode": hardness}
        options["hardness_strength"] = 5.0 if hardness else 0.0
        scale = torch.nn.Parameter(torch.tensor(15.0, dtype=torch.float64))
        loss = ours.MultipleNegativesRankingLoss(Given(), scale=scale, **options)
        assert list(loss.state_dict()) == ["scale"]
        loss(features(columns), None).backward()
        up, down = (
            theirs.MultipleNegativesRankingLoss(Given(), scale=15.0 + side * step, **options)(
                features(columns), None
            )
            for side in (1, -1)
        )
        wanted = (up - down) / (2 * step)
        torch.testing.assert_close(scale.grad, wanted, rtol=1e-5, atol=1e-8)
        assert loss.get_config_dict()["scale"] == 15.0


@pytest.mark.parametrize("tokens", [None, 30])
def test_cached_ranking(tokens):
    """Mini-batches by rows or by tokens: the same loss and gradients as the peer's chunks."""

    def masked(columns):
        mask = (torch.arange(9) < torch.arange(len(columns[0]))[:, None] % 9 + 1).long()
        return [{"embeddings": c, "input_ids": mask, "attention_mask": mask} for c in columns]

    for directions, hardness in zip(DIRECTIONS, itertools.cycle(HARDNESS), strict=False):
        options = {
            "directions": directions,
            "hardness_mode": hardness,
            "hardness_strength": 5.0 if hardness else 0.0,
            "mini_batch_size": 4,
            "mini_batch_num_tokens": tokens,
        }
        columns = scaled(vectors(3))
        same("CachedMultipleNegativesRankingLoss", options, columns, features=masked)


def test_cached_learnt_scale():
    """The returned loss carries the scale's derivative, whatever multiplies it."""
    columns, factor = vectors(3), 0.125
    grads = []
    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        scale = torch.nn.Parameter(torch.tensor(15.0))
        loss = getattr(ours, name)(Given(), scale=scale)
        leaves = [c.clone().requires_grad_() for c in columns]
        (loss(padded(leaves), None) * factor).backward()
        grads.append([scale.grad, *(leaf.grad for leaf in leaves)])
        assert loss.get_config_dict()["scale"] == 15.0
    for plain, cached in zip(*grads, strict=True):
        torch.testing.assert_close(cached, plain)


# ---- the guide ----


class Guided(Given):
    """The guide: the features hold its embeddings too."""

    def forward(self, features):
        return {"sentence_embedding": features["guide"]}


def gist(package, name, columns, guides, options, dtype):
    loss = getattr(package, name)(Given(), Guided(), **options).to(dtype)
    leaves = [column.detach().to(dtype).requires_grad_() for column in columns]
    batch = [
        {"embeddings": leaf, "guide": guide.to(dtype), "input_ids": torch.zeros(len(leaf), 2)}
        for leaf, guide in zip(leaves, guides, strict=True)
    ]
    value = loss(batch, None)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def same_gist(name, options, columns, guides):
    runs = [gist(package, name, columns, guides, options, dtype) for package, dtype in RUNS]
    hold(f"{name} {options}", runs, 1 / options.get("temperature", 0.01))


def decided(guides, margin):
    """Whether no guide cosine lies at its threshold, where rounding would decide."""
    units = [torch.nn.functional.normalize(g.double(), dim=1) for g in guides]
    own = (units[0] * units[1]).sum(1)
    gaps = []
    for bound in (own - margin, own - own.abs() * margin):
        for x, y in itertools.product(units[:2], units):
            gap = (x @ y.T - bound[:, None]).abs()
            gaps.append(gap.masked_fill(gap < 1e-12, 1.0).min())
    return min(gaps) > 1e-6


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("negatives", [0, 1])
@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
def test_gist(name, negatives, strategy):
    grid = itertools.product((0.0, 0.1, -0.2), (True, False), (True, False), (0.01, 0.5))
    for margin, anchors, positives, temperature in grid:
        columns = scaled(vectors(2 + negatives))
        guides = vectors(2 + negatives, width=7)
        while not decided(guides, margin):
            guides = vectors(2 + negatives, width=7)
        options = {
            "margin_strategy": strategy,
            "margin": margin,
            "contrast_anchors": anchors,
            "contrast_positives": positives,
            "temperature": temperature,
        }
        same_gist(name, options, columns, guides)


def test_gist_keeps_copies_of_the_positive():
    """A tie with the threshold is no false negative, whatever the order of the sums."""
    columns, guides = vectors(3, 70), vectors(3, 70, width=37)
    for column in guides[1:]:
        column[:] = guides[1][torch.arange(70) % 3]
    guides[0][:] = guides[0][torch.arange(70) % 2]
    same_gist("GISTEmbedLoss", {"temperature": 0.1}, columns, guides)


def test_cached_gist_takes_several_negatives():
    guides = vectors(5, width=7)
    same_gist("CachedGISTEmbedLoss", {"mini_batch_size": 4}, vectors(5), guides)
    with pytest.raises(ValueError, match="Expected 2 to 3 embeddings, got 5"):
        gist(ours, "GISTEmbedLoss", vectors(5), guides, {}, torch.float32)


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


@pytest.mark.parametrize("cached", [True, False])
def test_mega_batch(cached, regime):
    for rows, margins in itertools.product((1, 2, ROWS), ((0.8, 0.3), (0.2, -0.4))):
        options = {
            "positive_margin": margins[0],
            "negative_margin": margins[1],
            "use_mini_batched_version": cached,
            "mini_batch_size": 4,
        }
        same("MegaBatchMarginLoss", options, vectors(2, rows), features=padded)


# ---- triplets of classes ----

BATCH = [name for name in SHARED if name.startswith("Batch")]
METRIC = theirs.BatchHardTripletLossDistanceFunction
METRICS = [METRIC.euclidean_distance, METRIC.cosine_distance]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("name", BATCH)
def test_batch_triplets(name, metric, monkeypatch):
    from fastsim.losses import batch_triplets

    monkeypatch.setattr(batch_triplets, "BAND", 100)
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


# ---- what sentence-transformers lacks ----


def test_matrix_losses():
    import fastsim

    a, p, n = vectors(3)
    labels = torch.randint(0, 4, (ROWS,))
    both = torch.cat([p, n])
    assert torch.equal(
        ours.FullTripletLoss(Given(), margin=0.4, mining="hard")(features([a, p, n]), None),
        fastsim.full_triplet(a, both, margin=0.4, mining="hard"),
    )
    siglip, matrix = ours.SigLIPLoss(Given(), scale=5.0), ours.CoSENTMatrixLoss(Given(), scale=5.0)
    groups = labels, labels
    assert torch.equal(siglip(features([a, p, n]), None), fastsim.siglip(a, both, scale=5.0))
    assert torch.equal(siglip(features([a]), labels), fastsim.siglip(a, a, groups, scale=5.0))
    assert torch.equal(siglip(features([a, p]), labels), fastsim.siglip(a, p, groups, scale=5.0))
    wanted = fastsim.cosent_matrix(a, None, groups, scale=5.0)
    assert torch.equal(matrix(features([a]), labels), wanted)
    assert torch.equal(matrix(features([a, p]), None), fastsim.cosent_matrix(a, p, None, scale=5.0))
    for loss in (ours.FullTripletLoss(Given()), siglip, matrix):
        assert "@" in loss.citation
        options = [name for name in inspect.signature(type(loss)).parameters if name != "model"]
        assert list(loss.get_config_dict()) == options


def test_learnt_scale_and_bias_of_siglip():
    scale, bias = (torch.nn.Parameter(torch.tensor(v)) for v in (10.0, -10.0))
    loss = ours.SigLIPLoss(Given(), scale=scale, bias=bias)
    loss(features(vectors(2)), None).backward()
    assert scale.grad.isfinite()
    assert bias.grad != 0
    assert loss.get_config_dict() == {"scale": 10.0, "bias": -10.0}


# ---- interfaces ----


@pytest.mark.parametrize("name", SHARED)
def test_interface(name):
    mine, peer = getattr(ours, name), getattr(theirs, name)
    assert issubclass(mine, peer)
    assert inspect.signature(mine) == inspect.signature(peer)
    arguments = {"SoftmaxLoss": (WIDTH, 3), "GISTEmbedLoss": (Given(),)}
    arguments["CachedGISTEmbedLoss"] = arguments["GISTEmbedLoss"]
    model = Given()
    losses = [cls(model, *arguments.get(name, ())) for cls in (mine, peer)]
    configs = [loss.get_config_dict() for loss in losses]
    assert configs[0] == configs[1]
    assert losses[0].model is model
    assert getattr(losses[0], "citation", None) == getattr(losses[1], "citation", None)
    assert uses_gradient_cache(losses[0]) == uses_gradient_cache(losses[1])
    cached = name.startswith("Cached")
    assert callable(
        getattr(losses[0], "calculate_loss" if cached else "compute_loss_from_embeddings")
    )
    assert inspect.getdoc(mine) != inspect.getdoc(peer)


def test_import_leaves_sentence_transformers_alone():
    import subprocess
    import sys

    code = (
        "import sys, fastsim, fastsim.integrations\n"
        "assert 'sentence_transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
