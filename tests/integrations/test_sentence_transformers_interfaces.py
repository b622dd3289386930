"""Drop-in losses of sentence-transformers as their users see them: signatures, names, dtypes."""

import copy
import gc
import inspect
import itertools
import pickle
import warnings
import weakref

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import dtypes
from fastsim.integrations import sentence_transformers as ours
from tests.integrations.sentence_transformers_peer import (
    SHARED,
    WIDTH,
    Given,
    Guided,
    padded,
    same,
    scaled,
    total,
    vectors,
)


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
    configs = [getattr(loss, "get_config_dict", dict)() for loss in losses]
    assert configs[0] == configs[1]
    assert any(child is model for child in losses[0].children())
    assert getattr(losses[0], "citation", None) == getattr(losses[1], "citation", None)
    assert uses_gradient_cache(losses[0]) == uses_gradient_cache(losses[1])
    method = "calculate_loss" if name.startswith("Cached") else "compute_loss_from_embeddings"
    assert callable(getattr(losses[0], method, None)) or not hasattr(peer, method)
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
        assert getattr(ours, name)(Given()).unfused_reason() is None


# ---- what a trainer gets ----

TAUGHT = ("DistillKLDivLoss", "MarginMSELoss")
PLAIN = ("CoSENTLoss", "MultipleNegativesRankingLoss", "BatchAllTripletLoss", *TAUGHT)


def any_loss(package, name, model=None):
    arguments = {"SoftmaxLoss": (WIDTH, 3), "GISTEmbedLoss": (Guided(),)}
    arguments["CachedGISTEmbedLoss"] = arguments["GISTEmbedLoss"]
    arguments |= dict.fromkeys(TAUGHT, (util.pairwise_cos_sim,))
    torch.manual_seed(5)
    return getattr(package, name)(model or Given(), *arguments.get(name, ()))


def with_guides(columns, guides):
    """Features of columns at hand, which can be cut into mini-batches."""
    return [
        {"embeddings": column, "guide": guide, "input_ids": torch.zeros(len(column), 2)}
        for column, guide in zip(columns, guides, strict=False)
    ]


def any_batch(name, columns):
    """(columns, labels) that the loss takes."""
    classes = torch.randint(0, 3, (len(columns[0]),))
    classes[:4] = torch.tensor([0, 0, 1, 1])
    if name.startswith("Batch"):
        return columns[:1], classes
    if name.startswith("ContrastiveTension"):
        return columns[:1], None
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
    """Theirs, whatever it comes from; the value within its rounding of the truth, under autocast
    also of that of the embeddings in its dtype.
    """
    columns = [column.to(dtype) for column in vectors(3)]
    guides = vectors(3, width=7)
    columns, labels = any_batch(name, columns)
    low = torch.float16 if dtype == torch.float16 else torch.bfloat16
    rounded = [column.to(low) for column in columns] if autocast else columns

    def value(package, columns, kind):
        batch = with_guides([column.to(kind) for column in columns], guides)
        loss = any_loss(package, name).to(dtype)  # by which its own weights are rounded
        with torch.autocast("cpu", low, enabled=autocast and kind == dtype):
            return total(loss.to(kind)(batch, labels))

    mine, theirs_ = (value(package, columns, dtype) for package in (ours, theirs))
    assert mine.dtype == theirs_.dtype
    eps = max(torch.finfo(mine.dtype).eps, 1e-5)
    truths = [value(theirs, side, torch.float64) for side in (columns, rounded)]
    by_theirs = abs(theirs_ - truths[0])
    assert any(abs(mine - true) <= 2 * eps * max(1, abs(true)) + by_theirs for true in truths)


@pytest.mark.parametrize("name", TAUGHT)
def test_dtype_of_a_teacher(name):
    """It counts in theirs, whichever came first."""
    columns, scores = any_batch(name, [column.bfloat16() for column in vectors(3)])
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        mine, peers = (
            any_loss(package, name)(with_guides(columns, columns), scores.to(dtype))
            for package in (ours, theirs)
        )
        assert mine.dtype == peers.dtype


@pytest.mark.parametrize(
    ("name", "learnt"),
    [("CachedMultipleNegativesRankingLoss", "scale"), ("CachedGISTEmbedLoss", "temperature")],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_with_a_learnt_number(name, learnt, autocast):
    """The number may be wider than the loss, and so may its gradient."""
    columns = [column.bfloat16().requires_grad_() for column in vectors(2)]
    values = []
    for package in (ours, theirs):
        loss = any_loss(package, name)
        setattr(loss, learnt, torch.nn.Parameter(torch.tensor(0.5)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values.append(loss(with_guides(columns, columns), None))
        values[-1].backward()
        assert getattr(loss, learnt).grad.dtype == torch.float32
    assert values[0].dtype == values[1].dtype


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("MultipleNegativesRankingLoss", "scale"),
        ("CachedMultipleNegativesRankingLoss", "scale"),
        ("CoSENTLoss", "scale"),
        ("GISTEmbedLoss", "temperature"),
        ("CachedGISTEmbedLoss", "temperature"),
    ],
)
def test_dtype_with_a_tensor(name, option, monkeypatch):
    """Of shape (1,), which counts in theirs, whatever was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    columns, labels = any_batch(name, [column.bfloat16() for column in vectors(2)])
    for value in (torch.tensor([3.0]), 3.0, torch.tensor([3.0]).double()):
        found = []
        for package in (ours, theirs):
            loss = any_loss(package, name)
            setattr(loss, option, value)
            found.append(loss(with_guides(columns, columns), labels).dtype)
        assert found[0] == found[1]


class OfSoMany(torch.nn.MSELoss):
    """A user's function that takes batches of one size."""

    def forward(self, scores, labels):
        assert len(scores) == len(vectors(2)[0])
        return super().forward(scores, labels)


def test_a_function_that_refuses_few_rows():
    """Theirs is asked for its dtype on few: that may end no training."""
    columns = [column.bfloat16() for column in vectors(2)]
    labels = torch.rand(len(columns[0])).bfloat16()

    def value(package, columns):
        loss = package.CosineSimilarityLoss(Given(), loss_fct=OfSoMany())
        return loss(with_guides(columns, columns), labels.to(columns[0].dtype)).double()

    truth = value(theirs, [column.double() for column in columns])
    mine, plain = ((value(package, columns) - truth).abs() for package in (ours, theirs))
    assert mine <= 2 * (plain + torch.finfo(torch.float32).eps * truth)


def half(column):
    """As autocast to bfloat16 casts it."""
    return column if column.dtype == torch.float64 else column.bfloat16()


SEVERAL = [name for name in SHARED if not name.startswith("Batch")]


@pytest.mark.filterwarnings("ignore:The .* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float64")])
@pytest.mark.parametrize("name", SEVERAL)
def test_columns_of_two_dtypes(name, dtypes, autocast):
    """The dtype of theirs, where theirs takes them; where it does not, the one they promote to."""
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    columns, labels = any_batch(name, vectors(3))
    columns = [column.to(kind) for column, kind in zip(columns, itertools.cycle(kinds))]
    guides = [
        guide.to(kind) for guide, kind in zip(vectors(3, width=7), itertools.cycle(kinds[::-1]))
    ]

    def value(package, leaves, guides):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return total(any_loss(package, name)(with_guides(leaves, guides), labels))

    leaves = [column.clone().requires_grad_() for column in columns]
    mine = value(ours, leaves, guides)
    mine.backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    wide = [[side.double() for side in sides] for sides in (columns, guides)]
    truth, rounded = (
        total(any_loss(theirs, name).double()(with_guides(side, wide[1]), labels))
        for side in (wide[0], [half(side).double() for side in columns] if autocast else wide[0])
    )
    try:
        peers = value(theirs, columns, guides)
    except RuntimeError:
        assert not autocast or torch.float64 in kinds  # which autocast leaves alone
        peers = truth.to(kinds[1])
    assert mine.dtype == peers.dtype
    eps = max(torch.finfo(mine.dtype).eps, 1e-5)
    assert any(
        abs(mine - true) <= 2 * eps * max(1, abs(true)) + abs(peers - truth)
        for true in (truth, rounded)
    )


class Scorer:
    """A similarity that cannot be hashed, which something large may hang on."""

    __hash__ = None

    def __eq__(self, other):
        return self is other

    def __call__(self, x, y):
        return (x * y).sum(1)

    def method(self, x, y):
        return self(x, y)


@pytest.mark.parametrize("way", ["object", "method"])
def test_a_similarity_is_not_kept(way):
    scorer = Scorer()
    similarity = scorer if way == "object" else scorer.method
    columns, labels = any_batch("CoSENTLoss", [c.bfloat16() for c in vectors(2)])
    loss = ours.CoSENTLoss(Given(), similarity_fct=similarity)
    assert loss(with_guides(columns, columns), labels).isfinite()
    seen = weakref.ref(scorer)
    del loss, scorer, similarity
    gc.collect()
    assert seen() is None


PATCHED = [
    ("MultipleNegativesRankingLoss", "MultipleNegativesRankingLoss.compute_loss_from_embeddings"),
    ("CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss.calculate_loss"),
    ("MegaBatchMarginLoss", "MegaBatchMarginLoss.calculate_loss"),
    ("GISTEmbedLoss", "GISTEmbedLoss.forward"),
    ("CoSENTLoss", "CoSENTLoss.compute_loss_from_embeddings"),
    ("AnglELoss", "CoSENTLoss.compute_loss_from_embeddings"),
    ("SoftmaxLoss", "SoftmaxLoss.forward"),
    ("TripletLoss", "TripletLoss.compute_loss_from_embeddings"),
    ("BatchHardTripletLoss", "BatchHardTripletLoss.forward"),
    ("BatchHardSoftMarginTripletLoss", "BatchHardSoftMarginTripletLoss.forward"),
    ("BatchAllTripletLoss", "BatchAllTripletLoss.compute_loss_from_embeddings"),
    (
        "ContrastiveTensionLossInBatchNegatives",
        "ContrastiveTensionLossInBatchNegatives.forward",
    ),
]


@pytest.mark.parametrize(("name", "method"), PATCHED)
def test_a_patch_of_a_method_that_ours_overrides(name, method, monkeypatch):
    columns, labels = any_batch(name, vectors(3))
    batch = with_guides(columns, vectors(3, width=7))
    owner, _, method = method.partition(".")
    shipped = getattr(getattr(theirs, owner), method)
    monkeypatch.setattr(
        getattr(theirs, owner), method, lambda *given, **options: 2 * shipped(*given, **options)
    )
    with pytest.warns(UserWarning, match=f"{name}: {method} has been replaced"):
        value = any_loss(ours, name)(batch, labels)
    assert torch.equal(value, any_loss(theirs, name)(batch, labels))
    monkeypatch.undo()
    torch.testing.assert_close(value, 2 * any_loss(ours, name)(batch, labels))


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
