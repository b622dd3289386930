"""float64 gradcheck of every loss in every input, temperature, scale and bias included."""

import inspect

import pytest
import torch

import fastsim
from fastsim import losses
from tests.cases import BY_NAME, CASES, inputs, on_backend
from tests.measure import assert_close
from tests.seeds import fresh

BACKENDS = tuple(fastsim.backends())
SCALARS = ("temperature", "scale", "bias")


def scalars(case):
    """The options of the loss that may be tensors, with values that keep the loss curved."""
    values = {"temperature": 0.3, "scale": 3.0, "bias": -1.0}
    names = inspect.signature(case.loss).parameters
    # One that is None by default is a number.
    return {n: values[n] for n in SCALARS if n in names and names[n].default is not None}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "reduction"),
    [
        (case, reduction)
        for case in CASES
        if case.exact
        for reduction in ("mean", *(["none"] if case.reduces else []))
    ],
    ids=str,
)
def test_gradcheck(case, backend, reduction, usable):
    usable(backend)
    tensors, others, options = inputs(case, (5, 7, 4), torch.float64, seed=11)
    options |= on_backend(case, backend)
    options |= {"reduction": reduction} if case.reduces else {}
    learnt = scalars(case)
    sides = [t.requires_grad_() for t in tensors if t is not None]
    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in learnt.values()]

    def function(*leaves):
        arguments = list(leaves[: len(sides)])
        arguments += [None] * (len(tensors) - len(sides))
        learnt_options = dict(zip(learnt, leaves[len(sides) :], strict=True))
        return case.loss(*arguments, *others, **(options | learnt_options))

    assert torch.autograd.gradcheck(function, (*sides, *values))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in CASES for name in scalars(case)], ids=str
)
def test_scalar_alone(case, backend, name, usable):
    """Frozen embeddings, learnt temperature: the same gradient as when everything is learnt."""
    usable(backend)
    tensors, others, options = inputs(case, (6, 9, 4), torch.float32, seed=12)
    options |= {"backend": backend}
    grads = []
    for wanted in (False, True):
        value = torch.tensor(scalars(case)[name], requires_grad=True)
        sides = [t if t is None else t.clone().requires_grad_(wanted) for t in tensors]
        loss = case.loss(*sides, *others, **(options | {name: value}))
        grads.append(torch.autograd.grad(loss, value)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_begins_at_zero(backend, dtype, reduction, usable):
    usable(backend)
    tensors, others, options = inputs(BY_NAME["siglip"], (23, 27, 6), torch.float32, seed=14)
    scale = torch.zeros((), dtype=dtype, requires_grad=True)
    options |= {"reduction": reduction, "bias": 0.5}
    loss = BY_NAME["siglip"].loss(*tensors, *others, **options, scale=scale, backend=backend).sum()
    (got,) = torch.autograd.grad(loss, scale)
    assert got.dtype == dtype
    # dL/dscale = sum_ij (sigmoid(bias) - [j = i]) s_ij at scale 0.
    unit_x, unit_y = (t.double() / t.double().norm(dim=1, keepdim=True) for t in tensors)
    scores = unit_x @ unit_y.T
    wanted = scores.sum() * torch.sigmoid(torch.tensor(0.5).double()) - scores.diagonal().sum()
    wanted = wanted / (23 if reduction == "mean" else 1)
    # The rounding of the result, and a rounding of each term to float32.
    rounding = torch.finfo(dtype).eps * abs(wanted)
    assert abs(got - wanted) <= rounding + scores.numel() * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_and_selection(backend, usable):
    usable(backend)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x, y: fastsim.cosine_similarity(x, y, backend=backend),
        lambda x, y: fastsim.paired_cosine_similarity(x, y[:4], backend=backend),
        lambda x, y: fastsim.mean_negative(x, y, backend=backend),
        lambda x, y: fastsim.closest_negative(x, y, mining="hard", backend=backend)[0],
        lambda x, y: fastsim.angle_similarity(x, y[:4], backend=backend),
    ):
        assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradcheck(lambda x: fastsim.cosine_similarity(x, backend=backend), (x,))


FORMULAS = {
    "info_nce": lambda s: losses.info_nce_from_scores(s, temperature=0.02),
    "symmetric": lambda s: losses.info_nce_from_scores(s, temperature=0.02, symmetric=True),
    # Rows 2 i and 2 i + 1 are each other's positives.
    "sup_con": lambda s: losses.sup_con_from_scores(
        s[:, torch.arange(64) ^ 1], torch.arange(64) // 2, temperature=0.02
    ),
    "late_interaction": lambda s: losses.late_interaction_from_scores(s, temperature=0.02),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_where_the_positive_wins(name):
    """The specification is as accurate as torch's cross entropy, whose digits do not cancel."""
    generator = fresh(31)
    scores = 0.3 * torch.rand(64, 64, generator=generator, dtype=torch.float64)
    scores += 0.35 * torch.eye(64)

    def gradient(loss, dtype):
        given = scores.to(dtype).requires_grad_()
        return torch.autograd.grad(loss(given), given)[0].double()

    def cross_entropy(scores):
        return torch.nn.functional.cross_entropy(scores / 0.02, torch.arange(64))

    def error(loss):
        return (gradient(loss, torch.float32) - gradient(loss, torch.float64)).abs().max()

    scores = scores.float().double()  # which both dtypes hold
    # A share of 1, less 1, is rounded by half an eps; the mean and the temperature divide it.
    rounding = torch.finfo(torch.float32).eps / 2 / (64 * 0.02)
    assert error(FORMULAS[name]) <= 2 * max(error(cross_entropy), rounding)


@pytest.mark.parametrize("taught", ["scores", "embeddings"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_margins_of_rows_that_lie_close_together(backend, dtype, reduction, taught, usable):
    """All scores are alike then, and each margin is a small difference of them."""
    usable(backend)
    n, d = 65, 32
    x, y = ((torch.randn(n, d) * 0.03 + torch.randn(d)).to(dtype) for _ in range(2))
    teacher = (torch.rand(n, n),) if taught == "scores" else (torch.randn(n, 7), torch.randn(n, 7))

    def unit(rows):
        return rows / rows.norm(dim=1, keepdim=True)

    def dense(x, y):
        scores = unit(x) @ unit(y).T
        of_teacher = teacher[0].to(x.dtype)
        if taught == "embeddings":
            of_teacher = unit(of_teacher) @ unit(teacher[1].to(x.dtype)).T
        gaps = scores - of_teacher
        return (gaps.diagonal()[:, None] - gaps).square().sum() / (n - 1)

    def fused(x, y):
        given = {"kind": "margin_mse", "reduction": reduction, "backend": backend}
        return fastsim.distill(x, y, *teacher, **given).sum()

    def gradients(loss, dtype):
        leaves = [side.to(dtype).requires_grad_() for side in (x, y)]
        return torch.autograd.grad(loss(*leaves), leaves)

    got, truth = gradients(fused, dtype), gradients(dense, torch.float64)
    plain = gradients(dense, torch.float32)
    for name, *found in zip("xy", got, truth, plain, strict=True):
        assert_close(name, *found, dtype)


def test_classification():
    module = fastsim.losses.SoftmaxClassification(6, 3).double()
    u = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 1, 0])
    assert torch.autograd.gradcheck(lambda u, v: module(u, v, labels), (u, v))
    features = torch.cat([u, v, (u - v).abs()], 1) @ module.classifier.weight.T
    rows = zip(features, labels, strict=True)
    wanted = -torch.stack([f[t] - f.exp().sum().log() for f, t in rows]).mean()
    torch.testing.assert_close(module(u, v, labels), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("passes", ["in one call", "in passes"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case in CASES if case.reduces], ids=repr)
def test_the_gradient_of_a_sum_of_losses(case, backend, passes, dtype, request, usable):
    """What comes from above is then one number that stands for all rows."""
    usable(backend)
    if passes == "in passes":
        request.getfixturevalue("in_passes")
    tensors, others, options = inputs(case, (5, 7, 4), dtype, seed=12)
    options |= {"reduction": "none"} | on_backend(case, backend)
    found = []
    for as_sum in (True, False):
        leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
        values = case.loss(*leaves, *others, **options)
        if as_sum:
            values.sum().backward()
        else:
            values.backward(torch.ones_like(values))
        found.append([leaf.grad for leaf in leaves if leaf is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
