"""A memory of past embeddings, and the memory that the losses take."""

import os
import subprocess
import sys

import pytest
import torch

from tests.integrations.metric_learning_peer import (
    PAIR_LOSSES,
    WIDTH,
    batch,
    compare,
    distances,
    losses,
    miners,
    their_losses,
    their_miners,
)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [20, 24, 100])
@pytest.mark.parametrize("name", [*PAIR_LOSSES, "TripletMarginLoss"])
def test_memory(name, size, masked):
    """Batches of 8 into a memory that never fills, fills exactly, and wraps around."""
    steps = [batch(8, seed) for seed in range(6)]

    def call(kind, mine):
        def run(*xs):
            miner = mine.BatchHardMiner() if name == "TripletMarginLoss" else None
            loss = getattr(kind, name)()
            kept = kind.CrossBatchMemory(loss, WIDTH, memory_size=size, miner=miner)
            mask = torch.arange(8) < 3 if masked else None
            total = [
                kept(x, labels, enqueue_mask=mask) for x, (_, labels) in zip(xs, steps, strict=True)
            ]
            return sum(total)

        return run

    tensors = [x for x, _ in steps]
    compare(call(losses, miners), call(their_losses, their_miners), tensors)


def test_memory_of_what_is_not_fused_lists_its_pairs():
    x, labels = batch(8)
    options = {"distance": distances.LpDistance()}
    kept = losses.CrossBatchMemory(losses.NTXentLoss(**options), WIDTH, memory_size=32)
    theirs = their_losses.CrossBatchMemory(
        their_losses.NTXentLoss(**options), WIDTH, memory_size=32
    )
    with pytest.warns(UserWarning, match="only all pairs of the labels"):
        value = kept(x, labels)
    assert torch.equal(value, theirs(x, labels))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_few_pairs_of_a_memory(name):
    """Of a batch that is not itself in the memory."""
    x, labels = batch(3)[0], torch.tensor([0, 0, 1])
    mask = torch.tensor([True, False, True])

    def call(kind):
        kept = kind.CrossBatchMemory(getattr(kind, name)(), WIDTH, memory_size=8)
        return lambda x: kept(x, labels, enqueue_mask=mask)

    assert call(losses)(x) == call(their_losses)(x) == 0


def test_memory_of_single_rows():
    """Theirs keeps the pair of a single row with itself, as its positive."""
    kept, theirs = (
        kind.CrossBatchMemory(kind.NTXentLoss(temperature=1.0), WIDTH, memory_size=8)
        for kind in (losses, their_losses)
    )
    for seed in range(3):
        x, labels = batch(1, seed)[0].requires_grad_(), torch.tensor([seed])
        ours, peer = kept(x, labels), theirs(x, labels)
        assert ours == 0  # no class has come twice
    assert peer > 0


MEMORY = """
import resource, sys, torch
from fastsim.integrations.pytorch_metric_learning import losses, miners

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(rows):
    x = torch.randn(rows, 64, requires_grad=True)
    labels = torch.arange(rows) // 2
    before = peak()
    mined = [miners.BatchHardMiner()(x, labels)] if "Triplet" in sys.argv[1] else []
    getattr(losses, sys.argv[1])()(x, labels, *mined).backward()
    return peak() - before

run(256)
print(run(8192))
"""


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "TripletMarginLoss"])
def test_no_matrix(name, usable):
    """The rise of the peak in a fresh process, MB: an 8192 x 8192 float32 matrix is 256."""
    usable("cpu")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, name],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 100
