"""Drop-in losses of sentence-transformers: rankings, guided ones, interfaces.

Value and gradient over the grid of their arguments; truth: sentence_transformers_peer.py beside it.
"""

import contextlib
import copy
import inspect
import itertools
import pickle
import warnings

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from fastsim.integrations.sentence_transformers import mega_batch, ranking
from tests.integrations.sentence_transformers_peer import (
    DIRECTIONS,
    HARDNESS,
    ROWS,
    RUNS,
    SHARED,
    WIDTH,
    Given,
    Guided,
    features,
    hold,
    padded,
    run,
    same,
    scaled,
    vectors,
)


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


def test_other_similarities_are_theirs_and_say_so_once():
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


# ---- the guide ----


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


@pytest.mark.filterwarnings("ignore:The .* is deprecated:DeprecationWarning")
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


@pytest.mark.parametrize("name", [name for name in SHARED if "Symmetric" in name])
def test_symmetric_ranking(name):
    """Their deprecated names: the note is theirs, and the loss fused."""
    columns = scaled(vectors(2))
    for package in (ours, theirs):
        with pytest.warns(DeprecationWarning, match=f"{name} is deprecated"):
            getattr(package, name)(Given())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .* is deprecated", DeprecationWarning)
        same(name, {}, columns, features=padded)
        assert getattr(ours, name)(Given()).unfused_option() is None


# ---- what somebody has replaced ----

MATRICES = {"GISTEmbedLoss": "forward", "CachedGISTEmbedLoss": "calculate_loss"}


def guided(package, name, change, columns, guides):
    loss = getattr(package, name)(Given(), Guided(), temperature=0.3)
    change(loss)
    batch = [
        {"embeddings": column, "guide": guide, "input_ids": torch.zeros(len(column), 2)}
        for column, guide in zip(columns, guides, strict=True)
    ]
    return loss(batch, None)


def summed(loss):
    loss.cross_entropy_loss = torch.nn.CrossEntropyLoss(reduction="sum")


def halved(loss):
    matrix = loss.sim_matrix
    loss.sim_matrix = lambda x, y: matrix(x, y) / 2


class Products(torch.nn.Module):
    def forward(self, x, y):
        return (x * y).sum(-1)


def of_products(loss):
    loss.similarity_fct = Products()


@pytest.mark.parametrize("change", [summed, halved, of_products])
@pytest.mark.parametrize("name", MATRICES)
def test_guided_losses_run_what_was_replaced(name, change):
    columns, guides = vectors(3), vectors(3, width=7)
    plain = guided(ours, name, lambda loss: None, columns, guides)
    with pytest.warns(UserWarning, match=f"{name}: .* has no fused form; sentence-transformers'"):
        value = guided(ours, name, change, columns, guides)
    assert torch.equal(value, guided(theirs, name, change, columns, guides))
    assert abs(value - plain) > 1e-3
    guided(ours, name, change, columns, guides)  # a second note would be an error


def test_a_subclass_of_a_guided_loss(monkeypatch):
    columns, guides = vectors(2), vectors(2, width=7)
    values = []
    for package in (ours, theirs):

        class Halved(package.GISTEmbedLoss):
            def sim_matrix(self, *sides):
                return super().sim_matrix(*sides) / 2

        monkeypatch.setattr(package, "Halved", Halved, raising=False)
        expected = pytest.warns(UserWarning, match="Halved: sim_matrix has no fused form")
        with expected if package is ours else contextlib.nullcontext():
            values.append(guided(package, "Halved", lambda loss: None, columns, guides))
    assert torch.equal(*values)


# ---- what a trainer gets ----

TAUGHT = ("DistillKLDivLoss", "MarginMSELoss")
PLAIN = ("CoSENTLoss", "MultipleNegativesRankingLoss", "BatchAllTripletLoss", *TAUGHT)


def any_loss(package, name, model=None):
    arguments = {"SoftmaxLoss": (WIDTH, 3), "GISTEmbedLoss": (Guided(),)}
    arguments["CachedGISTEmbedLoss"] = arguments["GISTEmbedLoss"]
    arguments |= dict.fromkeys(TAUGHT, (util.pairwise_cos_sim,))
    torch.manual_seed(5)
    return getattr(package, name)(model or Given(), *arguments.get(name, ()))


def any_batch(name, columns):
    """(columns, labels) that the loss takes."""
    classes = torch.randint(0, 3, (len(columns[0]),))
    classes[:4] = torch.tensor([0, 0, 1, 1])
    if name.startswith("Batch"):
        return columns[:1], classes
    if name == "TripletLoss":
        return columns, None
    if name in TAUGHT:
        return columns, torch.rand(len(columns[0]), len(columns) - 1)
    if name in ("CoSENTLoss", "AnglELoss", "CosineSimilarityLoss"):
        return columns[:2], classes / 2
    return columns[:2], classes if name == "SoftmaxLoss" else None


@pytest.mark.filterwarnings("ignore:The .* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHARED)
def test_dtype_of_the_loss(name, dtype, autocast):
    """Theirs, whatever it comes from; the value within its rounding of the truth."""
    columns = [column.to(dtype) for column in vectors(3)]
    guides = vectors(3, width=7)
    columns, labels = any_batch(name, columns)
    found = []
    for package, kind in ((ours, dtype), (theirs, dtype), (theirs, torch.float64)):
        batch = [
            {"embeddings": c.to(kind), "guide": g, "input_ids": torch.zeros(len(c), 2)}
            for c, g in zip(columns, guides, strict=False)
        ]
        loss = any_loss(package, name)
        low = torch.float16 if dtype == torch.float16 else torch.bfloat16
        with torch.autocast("cpu", low, enabled=autocast and kind == dtype):
            found.append(loss.to(kind)(batch, labels))
    mine, theirs_, truth = found
    assert mine.dtype == theirs_.dtype
    if name != "SoftmaxLoss" or not autocast:  # its layer is autocast's
        eps = max(torch.finfo(mine.dtype).eps, 1e-5)
        assert abs(mine - truth) <= 2 * eps * max(1, abs(truth)) + abs(theirs_ - truth)


@pytest.mark.filterwarnings("ignore:The .* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", SHARED)
def test_model_cards_link_the_documentation(name):
    """The card links a class that is of the package; ours is found again by pickle."""
    assert util.fullname(getattr(ours, name)) == util.fullname(getattr(theirs, name))
    loss = any_loss(ours, name, torch.nn.Linear(2, 2)) if name in PLAIN else None
    if loss is not None:
        again = pickle.loads(pickle.dumps(loss))
        assert type(again) is type(loss) is getattr(ours, name)
        assert again.get_config_dict() == loss.get_config_dict()
        assert torch.equal(again.model.weight, loss.model.weight)
        assert type(copy.deepcopy(loss)) is type(loss)


def test_a_subclass_keeps_its_own_name():
    assert Own.__module__ == __name__
    assert type(pickle.loads(pickle.dumps(Own(None)))) is Own


class Own(ours.CoSENTLoss):
    """Somebody's own loss made of ours."""


def test_import_leaves_sentence_transformers_alone():
    import subprocess
    import sys

    code = (
        "import sys, fastsim, fastsim.integrations\n"
        "assert 'sentence_transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
