"""Negatives that are drawn: every choice is as likely, whatever the other draws are.

The share of each choice is near its chance: so near that fair draws fail once in 1e9 checks.
Source of the bound: Hoeffding 1963, "Probability inequalities for sums of bounded random
variables", theorem 1, equation 2.1: the chance that the share of n draws is as far off as q from p
is at most exp(-n (q log(q / p) + (1 - q) log((1 - q) / (1 - p)))) on either side.
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


def draw(count, seed, queries=QUERIES):
    """Tuples of ranks, one for each of many queries that all have the same neighbours."""
    angles = torch.arange(12) * 0.05
    corpus = torch.stack([angles.cos(), angles.sin()], 1)
    positives = torch.zeros(queries, dtype=torch.int64)
    same, ranks = corpus[:1].repeat(queries, 1), (FIRST, LAST)
    rows, _ = fastsim.mine_hard_negatives(
        same, corpus, positives, count=count, ranks=ranks, sample=True, seed=seed
    )
    return [tuple(row) for row in rows.tolist()]  # the positive is row 0: the others are ranks


def assert_fair(draws, choices):
    """Independent draws, of which each is one of the choices, all as likely."""
    choices = list(choices)
    counts = Counter(draws)
    assert counts.keys() <= set(choices)
    most = math.log(2 * len(choices) / RARE) / len(draws)
    for choice in choices:
        assert divergence(counts[choice] / len(draws), 1 / len(choices)) <= most, choice


def divergence(q, p):
    """That of a coin with chance q from one with chance p, in nats."""
    sides = (q, p), (1 - q, 1 - p)
    return sum(a * math.log(a / b) for a, b in sides if a > 0)


@pytest.mark.parametrize(("count", "queries"), [(1, 250_000), (2, QUERIES), (5, QUERIES)])
def test_every_set_of_ranks_is_as_likely(count, queries):
    """One rank of many queries: even a rank that is a twentieth too likely is seen."""
    assert_fair(draw(count, SEED, queries), itertools.combinations(CHOICES, count))


def test_draws_are_independent(monkeypatch):
    """Of the next query's, of the next part of the queries', and of the next seed's."""
    half = QUERIES // 2
    monkeypatch.setattr(mining, "_QUERIES", half)
    draws, others = draw(1, SEED), draw(1, SEED + 1)
    pairs = list(itertools.product(itertools.combinations(CHOICES, 1), repeat=2))
    for one, two in ((draws[0::2], draws[1::2]), (draws[:half], draws[half:]), (draws, others)):
        assert_fair(list(zip(one, two, strict=True)), pairs)
