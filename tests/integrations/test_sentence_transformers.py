"""Drop-in losses of sentence-transformers over a batch: rankings, and those that it lacks.

Value and gradient over the grid of their arguments; truth: sentence_transformers_peer.py beside it.
"""

import contextlib
import inspect
import itertools

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

import fastsim
from fastsim.integrations import sentence_transformers as ours
from fastsim.integrations.sentence_transformers import mega_batch, ranking
from tests.integrations.sentence_transformers_peer import (
    DIRECTIONS,
    HARDNESS,
    ROWS,
    WIDTH,
    Given,
    features,
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


def test_the_gradient_of_a_zero_row():
    """That of a row of length 1e-12 there; 0 here."""
    columns = vectors(2)
    columns[0][0] = 0.0
    found, wanted = (
        run(package.MultipleNegativesRankingLoss(Given()), columns, None, torch.float64)
        for package in (ours, theirs)
    )
    torch.testing.assert_close([found[0], found[1][1:]], [wanted[0], wanted[1][1:]])
    assert (found[1][0] == 0).all()
    assert wanted[1][0].abs().max() > 1e9


PER_DIRECTION = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
PRODUCTS = {"similarity_fct": util.dot_score, "scale": 0.3}


@pytest.mark.parametrize("options", [{}, PER_DIRECTION, {"hardness_mode": "all_negatives"}])
@pytest.mark.parametrize("kind", ["", "Cached"])
def test_products(kind, options):
    """One softmax of a row, or one of each side; a hardness of strength 0 is none."""
    name = f"{kind}MultipleNegativesRankingLoss"
    assert getattr(ours, name)(Given(), **PRODUCTS, **options).unfused_reason() is None
    for negatives in (0, 2):
        same(name, PRODUCTS | options, vectors(2 + negatives), features=padded)


BEYOND = [
    {"directions": ("query_to_doc", "query_to_query")},
    {"directions": ("query_to_doc", "doc_to_query")},
    PER_DIRECTION | {"gather_across_devices": True},
    {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
]


@pytest.mark.parametrize("options", BEYOND)
def test_products_that_are_theirs(options):
    columns, values = vectors(3), []
    for package in (ours, theirs):
        loss = package.MultipleNegativesRankingLoss(Given(), **PRODUCTS, **options)
        said = pytest.warns(UserWarning, match="similarity_fct has no fused form")
        with said if package is ours else contextlib.nullcontext():
            values.append(loss(features(columns), None))
    assert torch.equal(*values)


def test_other_similarities_are_theirs_and_say_so_once():
    columns = vectors(3)
    options = {"similarity_fct": util.euclidean_sim, "scale": 1.0}
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


@pytest.mark.parametrize("hardness", ["in_batch_negatives", "all_negatives"])
def test_hardness_in_float64(hardness, regime):
    """The gradients too, of a scale and a strength whose quotient float32 has not got."""
    options = {"scale": 7.0, "hardness_mode": hardness, "hardness_strength": 3.0}
    columns = vectors(3)
    found, wanted = (
        run(package.MultipleNegativesRankingLoss(Given(), **options), columns, None, torch.float64)
        for package in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


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


# ---- what sentence-transformers lacks ----


def test_matrix_losses():
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
    columns = vectors(2)
    scale, bias = (torch.nn.Parameter(torch.tensor(v)) for v in (10.0, -10.0))
    loss = ours.SigLIPLoss(Given(), scale=scale, bias=bias)
    loss(features(columns), None).backward()
    wanted = torch.autograd.grad(fastsim.siglip(*columns, scale=scale, bias=bias), (scale, bias))
    torch.testing.assert_close((scale.grad, bias.grad), wanted)
    assert all(grad != 0 for grad in wanted)
    assert loss.get_config_dict() == {"scale": 10.0, "bias": -10.0}
