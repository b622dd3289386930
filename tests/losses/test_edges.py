"""What goes wrong in practice: empty rows, zero rows, NaN, extremes, odd labels."""

import inspect

import pytest
import torch

import fastsim
from tests import oracles
from tests.cases import (
    CASES,
    WITH_ROWS,
    call,
    call_case,
    inputs,
    is_euclidean,
)
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())


def parameters(case):
    return inspect.signature(case.loss).parameters


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WITH_ROWS, ids=repr)
def test_zero_rows_have_zero_gradient(case, backend, usable):
    usable(backend)
    tensors, others, options = inputs(case, (6, 9, 4), torch.float32, seed=1)
    tensors[0][2] = 0
    value, grads = call_case(case, tensors, others, options, backend)
    assert value.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    if not is_euclidean(case):
        assert (grads[0][2] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_reach_the_closest_negative(backend, mining, value, usable):
    usable(backend)
    anchors, positives = torch.randn(6, 4), torch.randn(9, 4)
    every, _ = fastsim.closest_negative(anchors, positives, mining=mining, backend=backend)
    assert not every.isnan().any()
    positives[7, 2] = value
    every, _ = fastsim.closest_negative(anchors, positives, mining=mining, backend=backend)
    assert every.isnan().all()


# A dot product with an infinite number is infinite, and a loss of it may be 0.
REACHING = [
    (case, value)
    for case in CASES
    for value in (float("nan"), float("inf"))
    if value != float("inf") or "dot" not in case.name
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "value"), REACHING, ids=str)
def test_nan_and_inf_reach_the_loss(case, backend, value, usable):
    usable(backend)
    for side in range(len(case.make(3, 4, 5, torch.Generator())[0])):
        # Of so many rows two have different labels: CoSENT compares no others.
        tensors, others, options = inputs(case, (16, 19, 4), torch.float32, seed=2)
        if tensors[side] is None:
            continue
        # Of texts in the middle token of the first, which no mask takes for padding.
        texts = tensors[side].dim() == 3
        place = (0, tensors[side].shape[1] // 2, 1) if texts else (1,) * tensors[side].dim()
        tensors[side][place] = value
        loss, _ = call_case(case, tensors, others, options, backend)
        assert not loss.isfinite()
        if backend == "eager":
            first, *rest = (t for t in tensors if t is not None)
            nothing = [None] * (len(tensors) - 1 - len(rest))
            transformed = torch.func.vmap(
                lambda x, rest=rest, nothing=nothing, given=(others, options): case.loss(
                    x, *rest, *nothing, *given[0], **given[1]
                )
            )
            assert not transformed(first[None]).isfinite().any()


BY_GROUPS = [pair for pair in REACHING if "groups" in parameters(pair[0])]
BY_POSITIVES = [pair for pair in REACHING if "candidates" in parameters(pair[0])]


def losses_of(case, tensors, others, options, backend):
    """Reduced while a gradient is wanted, and where there are some those of the rows."""
    yield call_case(case, tensors, others, options, backend)[0]
    if case.reduces:
        yield case.loss(*tensors, *others, **options, reduction="none", backend=backend)


@pytest.mark.parametrize("groups", [torch.arange, torch.zeros], ids=["positives", "negatives"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "value"), BY_GROUPS, ids=str)
def test_nan_and_inf_reach_the_loss_of_rows_without(case, backend, value, groups, usable):
    usable(backend)
    tensors, _, options = inputs(case, (16, 19, 4), torch.float32, seed=2)
    tensors[0][1, 1] = value
    given = tensors, [groups(16).long()], options, backend
    for losses in losses_of(case, *given):
        assert not losses.isfinite().any()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "value"), BY_POSITIVES, ids=str)
def test_nan_and_inf_reach_the_loss_of_one_candidate(case, backend, value, side, usable):
    usable(backend)
    tensors, others, options = inputs(case, (1, 1, 4), torch.float32, seed=2)
    tensors[side][0, 1] = value
    for losses in losses_of(case, tensors, others, options, backend):
        assert not losses.isfinite().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_reach_the_loss_of_their_triplet(backend, value, usable):
    usable(backend)
    for side in range(3):
        tensors = [torch.randn(4, 3) for _ in range(3)]
        tensors[side][2, 1] = value
        with fastsim.use_backend(backend):
            losses = fastsim.triplet_margin(*tensors, reduction="none")
        assert losses.isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_negative_excluded(backend, usable):
    usable(backend)
    x = torch.randn(5, 4, requires_grad=True)
    y = torch.randn(5, 4, requires_grad=True)
    same = (torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    for loss in (fastsim.info_nce, fastsim.full_triplet):
        value = loss(x, y, exclude=same, backend=backend)
        grads = torch.autograd.grad(value, (x, y))
        assert value == 0
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_no_candidate_has_exclude_nothing(backend, usable, in_passes):
    """Below all of the candidates', and above."""
    usable(backend)
    x, y = torch.randn(2, 7, 5)
    own = torch.tensor([-9, 9, -8, 8, -7, 70, 7])
    for loss in (fastsim.info_nce, fastsim.full_triplet):
        found = [
            call(loss, [x, y], [], {"exclude": ids, "backend": backend})
            for ids in (None, (own, torch.randint(-3, 4, (7,))))
        ]
        (plain, grads), (excluded, others) = found
        torch.testing.assert_close(excluded, plain)
        torch.testing.assert_close(others, grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_of_one(backend, usable):
    usable(backend)
    x, y = torch.randn(1, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    for value in (
        fastsim.info_nce(x, y, symmetric=True, backend=backend),
        fastsim.full_triplet(x, y, backend=backend),
        fastsim.sup_con(x, torch.zeros(1, dtype=torch.long), backend=backend) + 0 * y.sum(),
        fastsim.cosent_matrix(x, None, None, backend=backend) + 0 * y.sum(),
    ):
        assert value == 0
        assert all((grad == 0).all() for grad in torch.autograd.grad(value, (x, y)))
    values, indices = fastsim.closest_negative(x, y, backend=backend)
    assert values.item() == -torch.inf
    assert indices.item() == -1
    assert fastsim.mean_negative(x, y, backend=backend).item() == -torch.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_repeats_bit_for_bit(case, backend, usable):
    usable(backend)
    shape = (130, 140, 34) if case.largest >= 10_000 else (15, 20, 34)
    tensors, others, options = inputs(case, shape, torch.float32, seed=8)
    first = call_case(case, tensors, others, options, backend)
    second = call_case(case, tensors, others, options, backend)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.float64]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_label_dtypes(backend, dtype, usable):
    usable(backend)
    scores = torch.randn(40)
    labels = torch.randint(0, 2, (40,))
    wanted = fastsim.cosent(scores, labels.float(), backend="eager")
    got = fastsim.cosent(scores, labels.to(dtype), backend=backend)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_only_differ_in_their_own_dtype(backend, usable):
    usable(backend)
    scores = torch.tensor([0.5, -0.5])
    labels = torch.tensor([2**60, 2**60 + 1])
    assert fastsim.cosent(scores, labels, backend=backend) > 0
    assert fastsim.cosent(scores, torch.tensor([0.0, -0.0]), backend=backend) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_want_a_gradient_get_none(backend, usable):
    usable(backend)
    u, v, labels = torch.randn(9, 4), torch.randn(9, 4), torch.rand(9)
    scores = torch.randn(9, requires_grad=True)
    for loss, sides in (
        (fastsim.cosent, (scores,)),
        (fastsim.angle, (u.requires_grad_(), v)),
    ):
        wanted = loss(*sides, labels, backend=backend)
        learnt = labels.clone().requires_grad_()
        got = loss(*sides, learnt, backend=backend)
        assert torch.equal(got, wanted)
        got.backward()
        assert learnt.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_cosent_without_pairs_is_zero(backend, usable):
    usable(backend)
    for count in (1, 6):
        scores = torch.randn(count, requires_grad=True)
        loss = fastsim.cosent(scores, torch.ones(count), backend=backend)
        (grad,) = torch.autograd.grad(loss, scores)
        assert loss == 0
        assert (grad == 0).all()


@pytest.mark.parametrize("spread", [1.0, 50.0, 5e3])
@pytest.mark.parametrize("distinct", [3, 300, 1000])
def test_cosent_scan(spread, distinct, usable):
    """Few labels, many labels, and logits past the range of double: three ways to one result."""
    usable("cpu")
    scores = (torch.randn(1000, dtype=torch.float64) * spread).requires_grad_()
    labels = torch.randint(0, distinct, (1000,)).double().sqrt()
    wanted = fastsim.cosent(scores, labels, backend="eager")
    got = fastsim.cosent(scores, labels, backend="cpu")
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, scores)[0], torch.autograd.grad(wanted, scores)[0]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_semi_hard_keeps_a_duplicate_of_the_positive(backend, usable):
    """A negative equal to the positive is as close as it, whatever the order of summation."""
    usable(backend)
    x, y = torch.randn(90, 33), torch.randn(90, 33)
    y[40:80] = y[:40]
    values, indices = fastsim.closest_negative(x, y, backend=backend)
    assert (indices[:40] == torch.arange(40, 80)).all()
    torch.testing.assert_close(values[:40], fastsim.paired_cosine_similarity(x, y)[:40])


def test_distance_zero_has_no_nan():
    x = torch.randn(3, 4, requires_grad=True)
    loss = fastsim.triplet_margin(x, x.detach().clone(), torch.randn(3, 4))
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.isfinite().all()


def test_triplet_with_one_side_learnt():
    tensors = [torch.randn(6, 5) for _ in range(3)]
    both = call(fastsim.triplet_margin, tensors, [], {})[1]
    for side in range(3):
        leaves = [t.clone().requires_grad_(i == side) for i, t in enumerate(tensors)]
        fastsim.triplet_margin(*leaves).backward()
        assert torch.equal(leaves[side].grad, both[side])


def test_rows_at_the_ends_of_the_range(usable):
    usable("cpu")
    direction = torch.randn(1, 12)
    for size in (1e-30, 1e30):
        x = (direction * size).requires_grad_()
        cosine = fastsim.cosine_similarity(x, direction).item()
        assert cosine == pytest.approx(1, abs=12 * torch.finfo(torch.float32).eps)  # of 12 terms


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sigmoid_loss_near_zero_keeps_its_digits(backend, usable):
    """Logits of 15 without rounding, of pairs that are wanted: log(1 + e^-15) each, and by the
    logit -1 / (1 + e^15).
    """
    usable(backend)
    x, bias = torch.eye(4)[:1].repeat(3, 1), torch.tensor(5.0, requires_grad=True)
    options = {"scale": 10.0, "bias": bias, "reduction": "none", "backend": backend}
    logit = torch.tensor(15.0, dtype=torch.float64)
    wanted, of_bias = 3 * (-logit).exp().log1p(), -9 / (1 + logit.exp())
    # What the exponent rounds, and a rounding each of exponential, logarithm, sum and result.
    rounding = torch.finfo(torch.float32).eps * (15 + 4)
    for targets in (torch.ones(3, 3), (torch.zeros(3).long(),) * 2):
        losses = fastsim.siglip(x, x, targets, **options).double()
        torch.testing.assert_close(losses, wanted.expand(3), rtol=rounding, atol=0)
        (grad,) = torch.autograd.grad(losses.sum(), bias)
        torch.testing.assert_close(grad.double(), of_bias, rtol=rounding, atol=0)


HINGES = [
    (fastsim.multi_similarity, {}),
    (fastsim.nt_xent, {"temperature": 0.05}),
    (fastsim.batch_hard_triplet, {"margin": 30.0, "soft": True}),
]


@pytest.mark.parametrize(("loss", "options"), HINGES, ids=lambda f: getattr(f, "__name__", ""))
@pytest.mark.parametrize("backend", BACKENDS)
def test_soft_hinges_far_beyond_the_margin(backend, loss, options, usable):
    """Their logits are 25 to 35 here, where softplus(x) is not yet x in float64."""
    usable(backend)
    x, groups = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    x[3:] = x[:3].roll(1, 0)  # every row has a copy in another group
    rows, dense = (
        loss(x, groups, **options, reduction="none", backend=by) for by in (backend, "eager")
    )
    oracle = getattr(oracles, loss.__name__)

    def truth(sides):
        return [oracle(*sides, groups, **options)]

    moved = torch.finfo(torch.float64).eps * conditioning(truth, [x])[0]
    (wanted,) = truth([x])
    assert_close("losses", rows, wanted, dense, torch.float64, moved=moved)
