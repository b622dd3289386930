"""Distillation over scores of tokens against the oracle, with every option; what the teacher is."""

import functools

import pytest
import torch

import fastsim
from fastsim.backends import get
from tests import oracles
from tests.cases import call
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

BACKENDS = tuple(name for name in fastsim.backends() if not get(name).unsupported_kind("max_sim"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
QUERIES, DOCUMENTS, TOKENS, WIDTH = 3, 5, (4, 7), 9
OPTIONS = {
    "alone": {},
    "one temperature": {"temperature": 0.4},
    "two temperatures": {"temperature": 0.4, "teacher_temperature": 1.7},
    "mean": {"average": True, "temperature": 0.05, "teacher_temperature": 0.6},
    "dot": {"similarity": "dot", "temperature": 4.0},
    "dot, mean": {"similarity": "dot", "average": True, "teacher_temperature": 2.0},
}


def mask_of(random, *shape):
    """Leaves every text a token, and most of them not all."""
    mask = torch.rand(shape, generator=random) < 0.5
    mask[..., shape[-1] // 2] = True
    return mask


def given(name, own, dtype=torch.float64):
    """(embeddings, other arguments, options); own: whether each query has documents of its own."""
    random = fresh(len(name) + own)
    of_each = (QUERIES, DOCUMENTS) if own else (DOCUMENTS,)
    shapes = (QUERIES, TOKENS[0]), (*of_each, TOKENS[1])
    sides = [torch.randn(*s, WIDTH, generator=random, dtype=torch.float64) for s in shapes]
    teacher = torch.randn(QUERIES, DOCUMENTS, generator=random)
    if own:
        teacher = (2 * teacher).round().long()
    masks = [None if name == "alone" else mask_of(random, *shape) for shape in shapes]
    return [side.to(dtype) for side in sides], [teacher, *masks], OPTIONS[name]


@functools.cache
def truth_of(name, own, dtype):
    """(value and gradients of the oracle, by how much they move)."""
    sides, others, options = given(name, own, dtype)

    def results(sides):
        value, grads = call(oracles.late_interaction_distillation, sides, others, options)
        return [value, *grads]

    wide = [side.double() for side in sides]
    return results(wide), conditioning(results, wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(backend, name, own, dtype, usable):
    usable(backend)
    sides, others, options = given(name, own, dtype)
    compute = torch.promote_types(dtype, torch.float32)
    found = []
    for kind, by in ((dtype, backend), (compute, "eager")):
        more = {"reduction": "none", "backend": by}
        same = [side.to(kind) for side in sides]
        loss = fastsim.late_interaction_distillation
        value, grads = call(loss, same, others, options | more)
        found.append([value, *grads])
    assert found[0][0].dtype == compute
    eps = torch.finfo(compute).eps
    results = zip(*found, *truth_of(name, own, dtype), strict=True)
    for place, (got, dense, exact, move) in enumerate(results):
        rounding = dtype if place else compute
        assert_close(f"result {place}", got, exact, dense, rounding, 1.0, eps * move)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reductions(backend, reduction, usable):
    usable(backend)
    sides, others, options = given("two temperatures", False)
    more = {"reduction": reduction, "backend": backend}
    got = call(fastsim.late_interaction_distillation, sides, others, options | more)

    def reduced(*arguments, **options):
        return getattr(oracles.late_interaction_distillation(*arguments, **options), reduction)()

    torch.testing.assert_close(got, call(reduced, sides, others, options))


@pytest.mark.parametrize("taught", [None, 0.7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learnt_temperature(backend, taught, usable):
    """Where it is the teacher's as well, the teacher is a constant all the same."""
    usable(backend)
    sides, others, _ = given("one temperature", True)
    temperature = torch.tensor(0.4, dtype=torch.float64)

    def with_temperature(loss):
        return lambda *sides: loss(*sides[:2], *others, temperature=sides[2])

    options = {"teacher_temperature": taught, "reduction": "none", "backend": backend}
    ours = functools.partial(fastsim.late_interaction_distillation, **options)
    options = {"teacher_temperature": taught or temperature.item()}
    truth = functools.partial(oracles.late_interaction_distillation, **options)
    got, wanted = (call(with_temperature(loss), [*sides, temperature], [], {})
                   for loss in (ours, truth))  # fmt: skip
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_teacher_gets_no_gradient(backend, usable):
    usable(backend)
    sides, (teacher, *masks), _ = given("one temperature", False)
    learnt = [side.requires_grad_() for side in (*sides, teacher)]
    fastsim.late_interaction_distillation(*learnt, *masks, backend=backend).backward()
    assert teacher.grad is None
    assert all(side.grad.any() for side in sides)


def test_a_teacher_of_fewer_digits_costs_none():
    queries, documents = (torch.randn(n, 3, 5, dtype=torch.float64) for n in (2, 4))
    teacher, temperature = torch.randn(2, 4), torch.tensor(0.4)

    def loss(teacher, temperature):
        given = {"temperature": temperature, "teacher_temperature": 0.7}
        return fastsim.late_interaction_distillation(queries, documents, teacher, **given)

    assert loss(teacher, temperature) == loss(teacher.double(), temperature.double())
