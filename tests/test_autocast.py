"""Embeddings under torch.autocast; each loss there: tests/engine/test_torch_integration.py."""

import pytest
import torch

import fastsim
from fastsim.autocast import in_autocast


def within(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


def test_tensors_alone_are_cast_and_one_stays_one():
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    given = x, (y, x), None, x.double(), x.half(), "x", torch.arange(3)
    with within():
        cast, (other, again), *rest = in_autocast(*given)
    assert cast.dtype == other.dtype == torch.bfloat16
    assert again is cast
    assert all(a is b for a, b in zip(rest, given[2:], strict=True))


def test_outside_of_a_context_nothing_is_cast():
    x = torch.randn(3, 2)
    with within(), torch.autocast("cpu", enabled=False):
        assert in_autocast(x)[0] is x
    assert in_autocast(x)[0] is x


def test_a_call_may_keep_float32():
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    with within(), torch.autocast("cpu", enabled=False):
        assert torch.equal(fastsim.info_nce(x, y), fastsim.info_nce(x.clone(), y))
        inside = fastsim.info_nce(x, y)
    assert torch.equal(inside, fastsim.info_nce(x, y))


@pytest.mark.parametrize("function", [fastsim.cosine_similarity, fastsim.paired_cosine_similarity])
def test_scores_keep_float32(function):
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    wanted = function(x, y)
    with within():
        assert torch.equal(function(x, y), wanted)


def test_max_sim_and_negatives_of_embeddings_in_its_dtype():
    x, y = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    low = [side.half() for side in (x, y)]
    with within(torch.float16):
        scores = fastsim.max_sim(x, y)
        values, indices = fastsim.closest_negative(x[0], y[0])
        mean = fastsim.mean_negative(x[0], y[0])
    assert torch.equal(scores, fastsim.max_sim(*low))
    wanted = fastsim.closest_negative(low[0][0], low[1][0])
    assert torch.equal(values, wanted[0])
    assert torch.equal(indices, wanted[1])
    assert torch.equal(mean, fastsim.mean_negative(low[0][0], low[1][0]))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_targets_in_the_other_half_precision(backend, usable):
    """Concatenation in a context takes no dtype of 16 bits but the context's own."""
    usable(backend)
    x, y, targets = torch.randn(5, 4), torch.randn(6, 4), torch.randint(3, (5, 6)).bfloat16()
    with within(torch.float16):
        loss = fastsim.cosent_matrix(x, y, targets, backend=backend)
    assert torch.equal(loss, fastsim.cosent_matrix(x.half(), y.half(), targets, backend=backend))


def test_references_in_the_other_half_precision():
    """Of so many rows that some processors hold them as more columns of one matrix."""
    x, y, references = (torch.randn(count, 384).bfloat16() for count in (160, 170, 300))
    with within(torch.float16):
        loss = fastsim.info_nce(x.requires_grad_(), y, references=references)
    assert torch.equal(loss, fastsim.info_nce(x, y, references=references))


def test_wrong_arguments_are_the_same_errors():
    x = torch.randn(3, 2)
    calls = [((x,), {}), ((x, x), {"anchors": x}), ((x,) * 4, {}), (([1.0], x), {})]
    calls += [((x, x[:, :1]), {}), ((), {"candidates": x}), ((x, x), {"temperatur": 1.0})]
    for given, options in calls:
        said = []
        for enabled in (False, True):
            context = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
            with context, pytest.raises((TypeError, ValueError)) as error:
                fastsim.info_nce(*given, **options)
            said.append((error.type, str(error.value)))
        assert said[0] == said[1]
