"""Poolings against plain loops."""

import pytest
import torch

from fastsim.encoders.encoder import POOLINGS, pool


def loop_pool(states, mask, pooling):
    """The definition, one row at a time, in float64."""
    rows = []
    for row, keep in zip(states.double(), mask.bool(), strict=True):
        real = row[keep]
        if len(real) == 0:
            rows.append(torch.zeros(states.shape[2], dtype=torch.float64))
        elif pooling == "mean":
            rows.append(sum(real) / len(real))
        elif pooling == "max":
            rows.append(torch.stack([max(column) for column in real.T]))
        elif pooling == "weighted_mean":
            weights = range(1, len(real) + 1)
            rows.append(sum(w * r for w, r in zip(weights, real, strict=True)) / sum(weights))
        else:
            rows.append(real[0] if pooling == "cls" else real[-1])
    return torch.stack(rows)


def rounding_of_means(states, count):
    """Of weighted means of so many states: a product and a sum for each, and the division."""
    eps = torch.finfo(states.dtype).eps
    return (2 * count + 1) * eps * states.abs().max().item()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pool_is_its_definition(pooling, side):
    lengths = torch.tensor([7, 1, 4, 0, 6])
    mask = (torch.arange(7) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    states = torch.randn(5, 7, 8) - 3  # negative, so that a zero of the padding would win a max
    states[~mask.bool()] = torch.nan if pooling in ("cls", "last", "max") else 1e4
    found = pool(states, mask, pooling)
    expected = loop_pool(states, mask, pooling)
    bound = rounding_of_means(states[mask.bool()], 7) if "mean" in pooling else 0.0
    assert (found - expected).abs().max() <= bound


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_are_counted_by_the_tokens(side):
    """Row by row the definition, in float64; of other poolings they change nothing."""
    lengths, skipped = [7, 3, 5], 2
    tokens = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    tokens = tokens.flip(1) if side == "left" else tokens
    mask = tokens * (tokens.cumsum(1) > skipped)
    states = torch.randn(3, 7, 4)
    found = pool(states, mask, "weighted_mean", tokens=tokens)
    for row, length, got in zip(states.double(), lengths, found, strict=True):
        real = row[-length:] if side == "left" else row[:length]
        places = range(skipped, length)
        wanted = sum((i + 1) * real[i] for i in places) / sum(i + 1 for i in places)
        assert (got - wanted).abs().max() <= rounding_of_means(states, length)
    for pooling in ("mean", "cls", "max", "last"):
        assert torch.equal(pool(states, mask, pooling, tokens=tokens), pool(states, mask, pooling))
    with pytest.raises(ValueError, match=r"tokens: wanted shape \(3, 7\) as the states, got \(2,"):
        pool(states, mask, tokens=torch.ones(2, 7))
    with pytest.raises(TypeError, match=r"tokens: wanted a torch.Tensor, got int"):
        pool(states, mask, tokens=1)


def test_pool_of_half_precision_is_accumulated_in_single():
    states = torch.full((1, 4096, 2), 1.0, dtype=torch.bfloat16)
    found = pool(states, torch.ones(1, 4096))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 1.0]]


def test_pool_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="pooling: wanted one of 'mean', 'cls'"):
        pool(torch.zeros(1, 1, 1), torch.ones(1, 1), "median")


@pytest.mark.parametrize(
    ("states", "mask", "kind", "said"),
    [
        ([[[1.0]]], torch.ones(1, 1), TypeError, "states: wanted a torch.Tensor, got list"),
        (torch.ones(1, 1, 1), None, TypeError, "mask: wanted a torch.Tensor, got NoneType"),
        (torch.ones(2, 3), torch.ones(2, 3), ValueError, r"states: wanted 3 .* got shape \(2, 3\)"),
        (
            torch.ones(2, 3, 4, 1),
            torch.ones(2, 3),
            ValueError,
            r"states: wanted 3 .* \(2, 3, 4, 1\)",
        ),
        (
            torch.ones(2, 3, 4),
            torch.ones(1, 3),
            ValueError,
            r"mask: wanted shape \(2, 3\) as the states, got \(1, 3\)",
        ),
    ],
)
def test_pool_checks_at_the_door(states, mask, kind, said):
    with pytest.raises(kind, match=said):
        pool(states, mask)
