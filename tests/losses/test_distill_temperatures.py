"""The temperatures of distillation, of which each may be left out: against the oracle."""

import pytest
import torch

import fastsim
from fastsim import losses
from tests import oracles
from tests.cases import call

BACKENDS = tuple(fastsim.backends())
GIVEN = [
    {},
    {"temperature": 0.3},
    {"teacher_temperature": 0.4},
    {"temperature": 0.6, "teacher_temperature": 1.7},
]


def problem(scores):
    """(sides, what is given of the teacher)."""
    sides = [torch.randn(rows, 7, dtype=torch.float64) for rows in (11, 13)]
    teacher = [torch.randn(rows, 3, dtype=torch.float64) for rows in (11, 13)]
    return sides, [oracles.cosines(*teacher)] if scores else teacher


@pytest.mark.parametrize("scores", [False, True], ids=["embeddings", "scores"])
@pytest.mark.parametrize("way", ["in one call", "in passes"])
@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(backend, kind, given, way, scores, request, usable):
    usable(backend)
    if way == "in passes":
        request.getfixturevalue("in_passes")
    sides, teacher = problem(scores)
    options = {"kind": kind, **given}
    more = {"reduction": "none", "backend": backend}
    got = call(fastsim.distill, sides, teacher, options | more)
    torch.testing.assert_close(got, call(oracles.distill, sides, teacher, options))


@pytest.mark.parametrize("given", GIVEN, ids=" ".join)
@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_the_specification_equals_the_oracle(kind, given):
    sides, teacher = problem(scores=True)
    options = {"kind": kind, **given}
    got = losses.distill_from_scores(oracles.cosines(*sides), *teacher, **options, reduction="none")
    torch.testing.assert_close(got, oracles.distill(*sides, *teacher, **options))
