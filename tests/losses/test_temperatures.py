"""Temperatures: extreme ones, ones of few bits, and learnt ones where some scores take no part."""

import functools
import inspect
from functools import partial

import pytest
import torch

import fastsim
from fastsim import losses
from tests.cases import BY_NAME, call, inputs
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learnt_temperature_of_documents_without_tokens(backend, symmetric, usable):
    """They take no part, and their scores of -inf make no NaN of its gradient."""
    usable(backend)
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 5, 4)
    mask = torch.tensor([True, True, False])[:, None].expand(3, 5)
    found = []
    for given in ((documents, None, mask), (documents[:2], None, None)):
        temperature = torch.tensor(0.7, requires_grad=True)
        options = {"temperature": temperature, "symmetric": symmetric, "backend": backend}
        loss = fastsim.late_interaction(queries, *given, **options)
        found.append((loss, *torch.autograd.grad(loss, temperature)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learnt_temperature_of_own_negatives_that_take_no_part(backend, usable):
    usable(backend)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    own = torch.stack([x, -x], 1)  # the anchor itself is above every positive
    found = []
    for negatives, above in ((own, 0.0), (own[:, 1:], None)):
        leaf = torch.tensor(0.5, requires_grad=True)
        options = {"own_negatives": negatives, "exclude_above": above, "backend": backend}
        options |= {"exclude": (torch.zeros(3).long(),) * 2}  # but for the own ones, the positive
        loss = fastsim.info_nce(x, y, **options, temperature=leaf)
        found.append((loss, *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*found)


def with_temperature(symmetric, dtype, temperature):
    """(embeddings, other arguments, options) of everything that InfoNCE has."""
    tensors, others, options = inputs(BY_NAME["info_nce-everything"], (11, 17, 6), dtype, seed=3)
    return tensors, others, options | {"temperature": temperature, "symmetric": symmetric}


@functools.cache
def truth_of(*given):
    """(value and gradients of the oracle, by how much they move)."""
    tensors, others, options = with_temperature(*given)

    def results(sides):
        oracle = BY_NAME["info_nce-everything"].oracle
        value, grads = call(lambda *a, **k: oracle(*a, **k).mean(), sides, others, options)
        return [value, *grads]

    wide = [t.double() for t in tensors]
    return results(wide), conditioning(results, wide)


@pytest.mark.parametrize("temperature", [0.001, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_temperatures(backend, symmetric, dtype, temperature, usable):
    usable(backend)
    tensors, others, options = with_temperature(symmetric, dtype, temperature)
    found = []
    for kind, by in ((dtype, backend), (torch.float32, "eager")):
        sides = [t.to(kind) for t in tensors]
        value, grads = call(fastsim.info_nce, sides, others, options | {"backend": by})
        found.append([value, *grads])
    parts = zip(*found, *truth_of(symmetric, dtype, temperature), strict=True)
    for place, (got, dense, exact, move) in enumerate(parts):
        rounding, size = (dtype, 0.0) if place else (torch.float32, 1.0)
        move *= torch.finfo(torch.float32).eps
        assert_close(f"result {place}", got, exact, dense, rounding, size, move)


@pytest.mark.parametrize("rows", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["info_nce", "sup_con", "nt_xent", "matrix_cross_entropy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_is_not_rounded_again(backend, kind, dtype, rows, usable):
    """Its inverse neither: that of 0.013 has more bits than bfloat16, of 1e-5 no float16 at all.

    Whatever the dtype of the rows.
    """
    usable(backend)
    case = BY_NAME[kind]
    tensors, others, options = inputs(case, (11, 17, 6), rows, seed=6)
    for number in (0.013, 1e-5):
        temperature = torch.tensor(number, dtype=dtype)
        given = options | {"temperature": temperature, "backend": backend}
        exact = options | {"temperature": temperature.item(), "backend": backend}
        value, wanted = (case.loss(*tensors, *others, **some) for some in (given, exact))
        torch.testing.assert_close(value, wanted)


ONE = {"temperature": 0.3, "scale": 3.0, "bias": -2.0}
SPECIFIED = [
    (loss, specification, inspect.signature(specification).parameters.keys() & ONE.keys())
    for loss, specification in losses.SPECIFICATIONS.items()
    if inspect.signature(loss).parameters.keys() & {"temperature", "scale"}
    if loss is not fastsim.distill  # which takes no tensor
]


def calls_of(loss, specification):
    """The loss and its specification as functions of options alone."""
    scores, groups = torch.rand(4, 4), torch.tensor([0, 1, 0, 1])
    takes = inspect.signature(specification).parameters
    given = [groups] if "groups" in takes else []
    if "labels" in takes:
        return [partial(each, scores[0], groups) for each in (loss, specification)]
    if loss is fastsim.late_interaction:
        return [partial(loss, scores[:, None], scores[:, None]), partial(specification, scores)]
    sides = [scores] if given else [scores, scores.flip(1)]
    targets = [None] if "targets" in takes else []
    return [
        partial(loss, *sides, *given, *targets),
        partial(specification, scores, *given, *targets),
    ]


@pytest.mark.parametrize(("loss", "specification", "names"), SPECIFIED)
def test_a_tensor_of_one_number_may_have_one_dimension(loss, specification, names):
    """FSDP2 shards no parameter of shape ()."""
    for function in calls_of(loss, specification):
        wanted = function(**{name: torch.tensor(ONE[name]) for name in names})
        given = {name: torch.tensor([ONE[name]], requires_grad=True) for name in names}
        got = function(**given)
        assert torch.equal(got, wanted)
        grads = torch.autograd.grad(got, given.values())
        assert all(grad.shape == (1,) for grad in grads)


def test_a_margin_and_weights_of_one_number_may_have_one_dimension():
    sides, one = torch.randn(3, 4, 5), torch.tensor([0.5])
    values = [fastsim.triplet_margin(*sides, margin=margin) for margin in (one, one[0])]
    assert values[0] == values[1]
    whole = losses.Matryoshka(losses.InfoNCE(), [5, 2], weights=[one, 1.0])(sides[0], sides[1])
    assert whole.shape == ()
