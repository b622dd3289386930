"""Gathering that somebody has replaced in a module of theirs: it runs, or their code does."""

import sys

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours
from tests.integrations.sentence_transformers_peer import DIRECTIONS, Given, Guided, hold, vectors

RANK, OPTIONS = 1, {"gather_across_devices": True}
LOSSES = {
    "MultipleNegativesRankingLoss": {"directions": DIRECTIONS[-1]},
    "CachedMultipleNegativesRankingLoss": {"directions": ("query_to_doc",)},
    "GISTEmbedLoss": {},
    "CachedGISTEmbedLoss": {},
}


def doubled(tensor):
    """What two ranks would have, this one the second."""
    return torch.cat([-tensor, tensor])


@pytest.mark.parametrize("name", LOSSES)
def test_functions_of_their_module_that_were_replaced(name, monkeypatch):
    home = sys.modules[getattr(theirs, name).__module__]
    monkeypatch.setattr(home, "all_gather_with_grad", doubled)
    monkeypatch.setattr(home, "get_rank", lambda: RANK)
    columns, guides = vectors(2), vectors(2, width=7)
    guide = (Guided(),) if "GIST" in name else ()
    runs = []
    for package, dtype in ((ours, torch.float32), (theirs, torch.float64), (theirs, torch.float32)):
        loss = getattr(package, name)(Given(), *guide, **OPTIONS, **LOSSES[name])
        leaves = [column.to(dtype, copy=True).requires_grad_() for column in columns]
        batch = [
            {"embeddings": leaf, "guide": side.to(dtype), "input_ids": torch.zeros(len(leaf), 2)}
            for leaf, side in zip(leaves, guides, strict=True)
        ]
        value = loss(batch, None)
        value.backward()
        runs.append([value.detach(), *(leaf.grad for leaf in leaves)])
    shortest = min(column.norm(dim=1).min().item() for column in columns)
    size = 100.0 if guide else 20.0
    hold(name, runs, size, 1 / (len(columns[0]) * shortest))
