"""Value and gradients equal to what people use today, to float32 rounding.

A peer that is not installed is skipped with its name.
"""

import pytest
import torch

import fastsim
from tests.integrations import open_clip_peer


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def same(ours, theirs, *leaves):
    """Both losses and their gradients agree to float32 rounding of sums of this size."""
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-6, atol=1e-6)
    for mine, peer in zip(gradients(ours, *leaves), gradients(theirs, *leaves), strict=True):
        torch.testing.assert_close(mine, peer, rtol=2e-5, atol=2e-6 * peer.abs().max().item())


def vectors(*shape):
    return torch.randn(*shape, requires_grad=True)


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
    columns = [vectors(23, 12) for _ in range(2 + negatives)]
    theirs = st_loss("MultipleNegativesRankingLoss", *columns)
    ours = fastsim.info_nce(columns[0], torch.cat(columns[1:]), temperature=1 / 20)
    same(ours, theirs, *columns)


def test_cosent():
    u, v = vectors(31, 8), vectors(31, 8)
    labels = torch.randint(0, 6, (31,)).float()
    same(
        fastsim.cosent(fastsim.paired_cosine_similarity(u, v), labels),
        st_loss("CoSENTLoss", u, v, labels=labels),
        u,
        v,
    )


def test_angle():
    u, v = vectors(31, 8), vectors(31, 8)
    labels = torch.randint(0, 6, (31,)).float()
    same(fastsim.angle(u, v, labels), st_loss("AnglELoss", u, v, labels=labels), u, v)


def test_cosine_similarity():
    u, v, labels = vectors(31, 8), vectors(31, 8), torch.rand(31)
    ours = fastsim.cosine_regression(u, v, labels)
    same(ours, st_loss("CosineSimilarityLoss", u, v, labels=labels), u, v)


def test_triplet():
    a, p, n = vectors(31, 8), vectors(31, 8), vectors(31, 8)
    ours = fastsim.triplet_margin(a, p, n, margin=5.0)
    same(ours, st_loss("TripletLoss", a, p, n), a, p, n)


@pytest.fixture(scope="module")
def open_clip_loss():
    return open_clip_peer.load() or pytest.skip("open_clip_torch is not installed")


def test_clip(open_clip_loss):
    x, y = vectors(23, 12), vectors(23, 12)
    scale = torch.tensor(14.3, requires_grad=True)
    unit = torch.nn.functional.normalize
    theirs = open_clip_loss.ClipLoss()(unit(x), unit(y), scale)
    ours = fastsim.info_nce(x, y, temperature=1 / scale, symmetric=True)
    same(ours, theirs, x, y, scale)


def test_siglip(open_clip_loss):
    x, y = vectors(23, 12), vectors(23, 12)
    scale = torch.tensor(10.0, requires_grad=True)
    bias = torch.tensor(-10.0, requires_grad=True)
    unit = torch.nn.functional.normalize
    theirs = open_clip_loss.SigLipLoss()(unit(x), unit(y), scale, bias)
    same(fastsim.siglip(x, y, scale=scale, bias=bias), theirs, x, y, scale, bias)


def test_sup_con():
    pytest.importorskip(
        "pytorch_metric_learning", reason="pytorch-metric-learning is not installed"
    )
    from pytorch_metric_learning.losses import SupConLoss

    x, groups = vectors(40, 9), torch.randint(0, 25, (40,))
    same(fastsim.sup_con(x, groups), SupConLoss(temperature=0.1)(x, groups), x)
