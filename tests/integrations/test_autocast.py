"""Embeddings of 16 bits under autocast of the other 16-bit dtype, which a CPU cannot join there."""

import itertools

import pytest
import torch

from tests.integrations.beside import results
from tests.integrations.lone_peer import ROWS, WIDTH, of
from tests.integrations.two_processes import of_each_rank
from tests.measure import assert_close, conditioning

SIXTEEN = [torch.bfloat16, torch.float16]


def other(dtype):
    return SIXTEEN[1 - SIXTEEN.index(dtype)]


def outcome(call, given, enabled=True):
    """[loss, gradients] of tensors of one 16-bit dtype, under autocast of the other if enabled."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    with torch.autocast("cpu", other(given[0].dtype), enabled=enabled):
        value = call(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def compare(ours, theirs, tensors, dtype):
    """Loss and gradients of 16-bit tensors: the dtypes of theirs, and its error at most."""
    given = [tensor.to(dtype) for tensor in tensors]
    wide = [tensor.double() for tensor in given]
    truth, moves = results(theirs, wide), conditioning(lambda wide: results(theirs, wide), wide)
    mine, dense = (outcome(call, given) for call in (ours, theirs))
    for *parts, move in zip(mine, truth, dense, moves, strict=True):
        assert parts[0].dtype == parts[2].dtype
        moved = torch.finfo(torch.float32).eps * move
        assert_close("result", *parts, parts[0].dtype, moved=moved, independent=True)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss", "DCLWLoss"])
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly(name, dtype, monkeypatch):
    from tests.integrations.test_lightly import packages

    losses = [getattr(package, name)() for package in packages(monkeypatch)]
    compare(*losses, [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)], dtype)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_proxies(dtype):
    from tests.integrations import metric_learning_peer as peer

    x, labels = peer.batch()

    def call(kind):
        loss = kind.ProxyAnchorLoss(peer.CLASSES, peer.WIDTH)
        proxies = of(*loss.proxies.shape, seed=4)

        def value(x):
            loss.proxies.data = proxies.to(x.dtype)
            return loss(x, labels)

        return value

    compare(call(peer.losses), call(peer.their_losses), [x], dtype)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "MultiSimilarityLoss", "CircleLoss"])
def test_a_memory(name, dtype):
    """Of which the last batch wraps around the end."""
    from tests.integrations import metric_learning_peer as peer

    batches = [peer.batch(8, seed) for seed in range(4)]

    def call(kind):
        def value(*sides):
            memory = kind.CrossBatchMemory(getattr(kind, name)(), peer.WIDTH, memory_size=20)
            return [memory(x, labels) for x, (_, labels) in zip(sides, batches, strict=True)][-1]

        return lambda x: value(*(side.to(x.dtype) for side, _ in batches[:-1]), x)

    compare(call(peer.losses), call(peer.their_losses), [batches[-1][0]], dtype)


DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
JOINING = [
    ("MultipleNegativesRankingLoss", {}),
    ("MultipleNegativesRankingLoss", {"directions": DIRECTIONS}),
    ("CachedMultipleNegativesRankingLoss", {}),
    ("GISTEmbedLoss", {}),
    ("CachedGISTEmbedLoss", {}),
    ("MegaBatchMarginLoss", {}),
    ("FullTripletLoss", {}),
    ("SigLIPLoss", {}),
]


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("name", "options"), JOINING)
def test_sentence_transformers(name, options, small, dtype, monkeypatch):
    """What it is without autocast; theirs joins columns too, and raises."""
    from tests.integrations import sentence_transformers_peer as peer

    monkeypatch.setattr("fastsim.integrations.sentence_transformers.ranking.SMALL", small << 16)
    guides = [of(ROWS, 7, seed=seed).to(dtype) for seed in (3, 4)]
    guide = [peer.Guided()] * ("GIST" in name)
    loss = getattr(peer.ours, name)(peer.Given(), *guide, **options)

    def value(*columns):
        if name.startswith("Cached"):
            sides = [[[side] for side in given] for given in (columns, guides)]
            return loss.calculate_loss(*sides[: 1 + len(guide)])
        return loss.compute_loss_from_embeddings(list(columns), None, *[guides] * len(guide))

    columns = [of(ROWS, WIDTH, seed=seed).to(dtype) for seed in (1, 2)]
    wanted, found = outcome(value, columns, enabled=False), outcome(value, columns)
    if name == "MultipleNegativesRankingLoss":
        loss = getattr(peer.theirs, name)(peer.Given(), **options)
        with pytest.raises(RuntimeError, match="autocast"):
            outcome(value, columns)
    found[0] = found[0].to(wanted[0].dtype)
    assert all(map(torch.equal, found, wanted))


def gathered(rank):
    """Features of both ranks, and the gradient of this rank's."""
    from fastsim.integrations.open_clip.gather import gather

    found = []
    for dtype, with_grad in itertools.product(SIXTEEN, [True, False]):
        features = of(3, WIDTH, seed=rank).to(dtype).requires_grad_()
        with torch.autocast("cpu", other(dtype)):
            whole = gather(features, rank, with_grad=with_grad)
        whole.sum().backward()
        found.append((whole.detach(), features.grad))
    return found


def test_open_clip_in_two_processes(tmp_path):
    reason = "open_clip_torch is not installed"
    pytest.importorskip("fastsim.integrations.open_clip", reason=reason, exc_type=ImportError)
    whole = torch.cat([of(3, WIDTH, seed=rank) for rank in range(2)])
    for found in of_each_rank(gathered, tmp_path):
        for rows, grad in found:
            assert torch.equal(rows, whole.to(rows.dtype))
            assert grad.unique().numel() == 1
