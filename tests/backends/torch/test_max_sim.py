"""Documents of each query's own, several queries at a time, against the formula."""

import pytest
import torch

import fastsim
from fastsim.backends.torch import max_sim, panels
from fastsim.backends.torch.backend import TorchBackend
from fastsim.tokens import Tokens

QUERIES, LONG, EACH, LENGTH, WIDTH = 7, 3, 2, 5, 6


def tokens(dtype):
    queries = torch.randn(QUERIES, LONG, WIDTH).to(dtype)
    documents = torch.randn(QUERIES, EACH, LENGTH, WIDTH).to(dtype)
    masks = torch.rand(QUERIES, LONG) < 0.8, torch.rand(QUERIES, EACH, LENGTH) < 0.6
    masks[1][:, :, 0] = True
    masks[1][2, 1] = False  # a document without a token
    return (queries, documents), masks


def scores_and_gradients(sides, masks, backend, similarity):
    leaves = [side.detach().clone().requires_grad_() for side in sides]
    scores = fastsim.max_sim(*leaves, *masks, similarity=similarity, backend=backend)
    finite = torch.where(scores.isfinite(), scores, 0.0)
    finite.square().sum().backward()
    return scores.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("together", [1, 3, QUERIES])
def test_as_the_formula(together, masked, similarity, monkeypatch):
    monkeypatch.setattr(panels, "panel_scores", lambda device: together * LONG * EACH * LENGTH)
    sides, masks = tokens(torch.float64)
    masks = masks if masked else (None, None)
    found, wanted = (
        scores_and_gradients(sides, masks, name, similarity) for name in ("torch", "eager")
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("together", [1, 3, QUERIES])
def test_a_panel_for_as_many_as_fill_it(together, monkeypatch):
    asked, each = [], panels.multiply_each

    def noted(left, right, out):
        asked.append(len(left))
        each(left, right, out)

    monkeypatch.setattr(panels, "panel_scores", lambda device: together * LONG * EACH * LENGTH)
    monkeypatch.setattr(panels, "multiply_each", noted)
    scores_and_gradients(*tokens(torch.float32), "torch", "cosine")
    wanted = [together] * (QUERIES // together)
    assert asked == wanted + [QUERIES % together] * (QUERIES % together > 0)


def test_operands_of_16_bits(monkeypatch):
    """As on a device that multiplies them into float32 scores."""
    monkeypatch.setattr(panels, "half_products", lambda *_: True)
    sides, masks = tokens(torch.bfloat16)
    x, y = (Tokens.of(side.flatten(0, -3), None, None) for side in sides)
    left, right = (max_sim._operand(TorchBackend(), side.rows, True) for side in (x, y))
    assert left.dtype == right.dtype == torch.float16
    found = scores_and_gradients(sides, masks, "torch", "cosine")
    truth = scores_and_gradients([side.double() for side in sides], masks, "eager", "cosine")
    off = torch.where(truth[0].isfinite(), found[0] - truth[0], 0.0)
    assert off.abs().max() <= 2 * LONG * torch.finfo(torch.float16).eps
