"""Value and gradients equal to what people use today, to float32 rounding.

Truth is their code in float64. A peer that is not installed is skipped with its name.
"""

from functools import partial

import pytest
import torch

import fastsim
from tests.integrations import open_clip_peer
from tests.measure import assert_close, conditioning


def results(loss, tensors, dtype):
    """[value, gradients] of loss(*tensors) in dtype."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def same(ours, theirs, *tensors):
    """Value and gradients of ours are as near to theirs in float64 as theirs in float32 are."""

    def wide(tensors):
        return results(theirs, tensors, torch.float64)

    truth, eps = wide(tensors), torch.finfo(torch.float32).eps
    moved = conditioning(wide, [tensor.double() for tensor in tensors])
    mine, dense = (results(loss, tensors, torch.float32) for loss in (ours, theirs))
    for place, found in enumerate(zip(mine, truth, dense, strict=True)):
        name = f"gradient {place}" if place else "value"
        assert_close(name, *found, torch.float32, moved=eps * moved[place])


class Given(torch.nn.Module):
    """Stands in for the encoder of a sentence-transformers loss: gives stored embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["sentence_embedding"]}


def st_loss(name, *columns, labels=None, **options):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, name)(Given(), **options)
    return loss([{"sentence_embedding": c} for c in columns], labels)


@pytest.mark.parametrize("negatives", [0, 1, 3])
def test_multiple_negatives_ranking(negatives):
    columns = [torch.randn(23, 12) for _ in range(2 + negatives)]

    def ours(anchors, *others):
        return fastsim.info_nce(anchors, torch.cat(others), temperature=1 / 20)

    same(ours, lambda *columns: st_loss("MultipleNegativesRankingLoss", *columns), *columns)


def test_cosent():
    u, v = torch.randn(31, 8), torch.randn(31, 8)
    labels = torch.randint(0, 6, (31,)).float()
    same(
        lambda u, v: fastsim.cosent(fastsim.paired_cosine_similarity(u, v), labels),
        lambda u, v: st_loss("CoSENTLoss", u, v, labels=labels),
        u,
        v,
    )


def test_angle():
    u, v = torch.randn(31, 8), torch.randn(31, 8)
    labels = torch.randint(0, 6, (31,)).float()
    same(
        lambda u, v: fastsim.angle(u, v, labels),
        lambda u, v: st_loss("AnglELoss", u, v, labels=labels),
        u,
        v,
    )


def test_cosine_similarity():
    u, v, labels = torch.randn(31, 8), torch.randn(31, 8), torch.rand(31)

    def theirs(u, v):
        return st_loss("CosineSimilarityLoss", u, v, labels=labels.to(u.dtype))

    same(lambda u, v: fastsim.cosine_regression(u, v, labels), theirs, u, v)


def test_triplet():
    a, p, n = torch.randn(31, 8), torch.randn(31, 8), torch.randn(31, 8)
    ours = partial(fastsim.triplet_margin, margin=5.0)
    same(ours, lambda *columns: st_loss("TripletLoss", *columns), a, p, n)


@pytest.fixture(scope="module")
def open_clip_loss():
    return open_clip_peer.load() or pytest.skip("open_clip_torch is not installed")


def test_clip(open_clip_loss):
    x, y = torch.randn(23, 12), torch.randn(23, 12)
    unit = torch.nn.functional.normalize
    same(
        lambda x, y, scale: fastsim.info_nce(x, y, temperature=1 / scale, symmetric=True),
        lambda x, y, scale: open_clip_loss.ClipLoss()(unit(x), unit(y), scale),
        x,
        y,
        torch.tensor(14.3),
    )


def test_siglip(open_clip_loss):
    x, y = torch.randn(23, 12), torch.randn(23, 12)
    unit = torch.nn.functional.normalize
    same(
        lambda x, y, scale, bias: fastsim.siglip(x, y, scale=scale, bias=bias),
        lambda x, y, *numbers: open_clip_loss.SigLipLoss()(unit(x), unit(y), *numbers),
        x,
        y,
        torch.tensor(10.0),
        torch.tensor(-10.0),
    )


def test_sup_con():
    pytest.importorskip(
        "pytorch_metric_learning", reason="pytorch-metric-learning is not installed"
    )
    from pytorch_metric_learning.losses import SupConLoss

    x, groups = torch.randn(40, 9), torch.randint(0, 25, (40,))
    theirs = SupConLoss(temperature=0.1)
    same(lambda x: fastsim.sup_con(x, groups), lambda x: theirs(x, groups), x)
