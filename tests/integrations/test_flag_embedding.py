"""The losses of FlagEmbedding's models against ours in their place."""

import functools
import importlib
import sys

import pytest
import torch

from fastsim.integrations import dtypes
from tests.integrations.beside import compare
from tests.integrations.lone_peer import ROWS, WIDTH, alone, mixed, of

MODELS = "FlagEmbedding.finetune.embedder.encoder_only.base.modeling"


@pytest.fixture
def flag(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    abstract = alone(monkeypatch, "FlagEmbedding.abc.finetune.embedder.AbsModeling")
    package = sys.modules["FlagEmbedding.abc.finetune.embedder"]
    monkeypatch.setattr(package, "AbsEmbedderModel", abstract.AbsEmbedderModel, raising=False)
    theirs = alone(monkeypatch, MODELS)
    ours = importlib.import_module("fastsim.integrations.flag_embedding")

    class Model(theirs.BiEncoderOnlyEmbedderModel):
        """Their encoder-only model's loss of embeddings at hand."""

        def encode(self, features):
            return features

    return Model, ours


def patched(flag):
    """(a model with our loss, one with theirs)."""
    model, ours = flag

    class Changed(model):
        _compute_in_batch_neg_loss = ours.in_batch_loss
        _compute_cross_device_neg_loss = ours.cross_device_loss

    return Changed, model


def pairs(passages):
    return [torch.nn.functional.normalize(of(n, WIDTH, seed=n)) for n in (ROWS, ROWS * passages)]


BFLOAT16 = torch.tensor(0.3).bfloat16()


@pytest.mark.parametrize(("passages", "temperature"), [(1, 1.0), (4, 0.02), (4, BFLOAT16)])
def test_flag_embedding(flag, passages, temperature):
    sides = pairs(passages)
    losses = [kind(None, temperature=temperature).train() for kind in patched(flag)]
    compare(*(lambda q, p, loss=loss: loss(q, p).loss for loss in losses), sides)
    teacher = torch.rand(ROWS * passages).tolist()
    values = [loss(*sides, teacher_scores=teacher).loss for loss in losses]
    torch.testing.assert_close(*values)
    half = [side.bfloat16() for side in sides]
    assert len({loss(*half).loss.dtype for loss in losses}) == 1


def across(kind, **options):
    """A model that gathers from two devices, this one the second."""

    class Across(kind):
        process_rank = 1

        def _dist_gather_tensor(self, t):
            return torch.cat([-t.detach(), t])

    loss = Across(None, **options).train()
    loss.negatives_cross_device = True
    return loss


@pytest.mark.parametrize("passages", [1, 3])
def test_flag_embedding_across_devices(flag, passages, monkeypatch):
    sides = pairs(passages)
    losses = [across(kind, temperature=0.1) for kind in patched(flag)]
    compare(*(lambda q, p, loss=loss: loss(q, p).loss for loss in losses), sides)
    teacher = torch.rand(ROWS * passages).tolist()
    values = [loss(*sides, teacher_scores=teacher).loss for loss in losses]
    assert torch.equal(*values)
    for loss in losses:
        loss.cross_entropy = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.warns(UserWarning, match="cross_entropy has been replaced; FlagEmbedding's"):
        value = losses[0](*sides).loss
    assert torch.equal(value, losses[1](*sides).loss)
    monkeypatch.setattr(flag[1], "_theirs", None)  # which the loss of one device would call
    scores = functools.partial(torch.cdist)
    own = losses[0]._compute_cross_device_neg_loss(*sides, compute_score_func=scores)
    assert torch.equal(own[1], losses[1]._compute_cross_device_neg_loss(*sides, None, scores)[1])


METHODS = "_compute_in_batch_neg_loss", "_compute_cross_device_neg_loss"


@pytest.mark.parametrize("method", METHODS)
def test_flag_embedding_of_other_scores(flag, method):
    """Their code computes it, with the options of the function of scores."""

    def scores(queries, passages, *, factor):
        return -factor * torch.cdist(queries, passages)

    sides = pairs(2)
    losses = [getattr(across(kind), method) for kind in patched(flag)]
    values = [loss(*sides, compute_score_func=scores, factor=0.3)[1] for loss in losses]
    assert torch.equal(*values)


DECODERS = {"base": "BiDecoderOnlyEmbedderModel", "icl": "BiDecoderOnlyEmbedderICLModel"}


@pytest.mark.parametrize("kind", DECODERS)
def test_flag_embedding_of_decoders_is_fused(flag, kind, monkeypatch):
    theirs = alone(monkeypatch, f"FlagEmbedding.finetune.embedder.decoder_only.{kind}.modeling")
    ours = across(getattr(theirs, DECODERS[kind]), temperature=0.1)
    sides = pairs(2)
    found, wanted = flag[1].in_batch_loss(ours, *sides), ours._compute_in_batch_neg_loss(*sides)
    torch.testing.assert_close(found[1], wanted[1])  # a warning would be an error


def test_flag_embedding_across_devices_is_fused(flag, monkeypatch):
    losses = [across(kind) for kind in patched(flag)]
    monkeypatch.setattr(flag[1], "cross_entropy", lambda *given, **named: torch.tensor(7.0))
    assert losses[0](*pairs(2)).loss == 7


def test_flag_embedding_of_two_dtypes(flag):
    given, plain = mixed(pairs(2))
    ours, theirs = (kind(None, temperature=0.1).train() for kind in patched(flag))
    torch.testing.assert_close(ours(*given).loss, ours(*plain).loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).loss.dtype == theirs(*given).loss.dtype


def test_the_dtype_of_a_loss_with_a_tensor(flag, monkeypatch):
    """Of shape (1,), which counts in theirs, whatever was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    half, kinds = [side.bfloat16() for side in pairs(2)], patched(flag)
    for value in (torch.tensor([0.3]), 0.3, torch.tensor([0.3]).double()):
        ours, theirs = (kind(None, temperature=value).train()(*half).loss for kind in kinds)
        assert ours.dtype == theirs.dtype


def test_flag_embedding_of_another_width(flag):
    queries, passages = pairs(2)
    loss = patched(flag)[0](None).train()
    with pytest.raises(ValueError, match=f"p_reps: wanted width {WIDTH}"):
        loss(queries, passages[:, 1:])


def doubled(kind):
    class Doubled(kind):
        def compute_score(self, queries, passages):
            return 2 * super().compute_score(queries, passages)

    return Doubled(None)


def distances(kind):
    loss = kind(None)
    loss._compute_similarity = lambda queries, passages: -torch.cdist(queries, passages)
    return loss


def own_loss(kind):
    class Own(kind):
        def compute_loss(self, scores, target):
            return torch.nn.functional.multi_margin_loss(scores, target)

    return Own(None)


def smoothed(kind):
    loss = kind(None)
    loss.cross_entropy = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    return loss


def summed(kind):
    loss = kind(None)
    loss.cross_entropy.reduction = "sum"
    return loss


def negative(kind):
    return kind(None, temperature=-0.5)


REPLACED = {
    doubled: "compute_score",
    distances: "_compute_similarity",
    own_loss: "compute_loss",
    smoothed: "cross_entropy",
    summed: "cross_entropy",
    negative: "temperature",
}


@pytest.mark.parametrize("change", REPLACED)
def test_flag_embedding_where_something_was_replaced(flag, change):
    sides = pairs(2)
    ours, theirs = (change(kind).train() for kind in patched(flag))
    with pytest.warns(UserWarning, match=f"{REPLACED[change]} has .*; FlagEmbedding's"):
        value = ours(*sides).loss
    assert torch.equal(value, theirs(*sides).loss)
    assert torch.equal(ours(*sides).loss, value)  # a second note would be an error
