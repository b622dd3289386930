"""Negatives that are drawn: every choice is as likely, whatever the other draws are.

The share of each choice is near its chance: so near that fair draws fail once in 1e9 checks.
Source of the bound: Hoeffding 1963, "Probability inequalities for sums of bounded random
variables", theorem 1.
"""

import itertools
import math
from collections import Counter

import pytest
import torch

import fastsim
from fastsim import mining
from tests.seeds import SEED

FIRST, LAST = 3, 8
CHOICES = range(FIRST, LAST + 1)
QUERIES = 8000
RARE = 1e-9


def draw(count, seed):
    """Tuples of ranks, one for each of many queries that all have the same neighbours."""
    angles = torch.arange(12) * 0.05
    corpus = torch.stack([angles.cos(), angles.sin()], 1)
    positives = torch.zeros(QUERIES, dtype=torch.int64)
    queries, ranks = corpus[:1].repeat(QUERIES, 1), (FIRST, LAST)
    rows, _ = fastsim.mine_hard_negatives(
        queries, corpus, positives, count=count, ranks=ranks, sample=True, seed=seed
    )
    return [tuple(row) for row in rows.tolist()]  # the positive is row 0: the others are ranks


def assert_fair(draws, choices):
    """Independent draws, of which each is one of the choices, all as likely."""
    choices = list(choices)
    counts = Counter(draws)
    assert counts.keys() <= set(choices)
    bound = math.sqrt(math.log(2 * len(choices) / RARE) / (2 * len(draws)))
    for choice in choices:
        assert abs(counts[choice] / len(draws) - 1 / len(choices)) <= bound, choice


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_set_of_ranks_is_as_likely(count):
    assert_fair(draw(count, SEED), itertools.combinations(CHOICES, count))


def test_draws_are_independent(monkeypatch):
    """Of the next query's, of the next part of the queries', and of the next seed's."""
    half = QUERIES // 2
    monkeypatch.setattr(mining, "_QUERIES", half)
    draws, others = draw(1, SEED), draw(1, SEED + 1)
    pairs = list(itertools.product(itertools.combinations(CHOICES, 1), repeat=2))
    for one, two in ((draws[0::2], draws[1::2]), (draws[:half], draws[half:]), (draws, others)):
        assert_fair(list(zip(one, two, strict=True)), pairs)
