"""Every loss on every backend and dtype against its float64 oracle: value and gradients."""

import pytest
import torch

import fastsim
from tests.cases import CASES, SHAPES, call, inputs, takes_backend
from tests.measure import assert_close

BACKENDS = tuple(fastsim.backends())
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def names(value):
    return str(value).removeprefix("torch.").replace(" ", "")


def compare(case, backend, dtype, shape, seed, **extra):
    tensors, others, options = inputs(case, shape, dtype, seed)
    options |= extra
    reduction = options.pop("reduction", None)
    exact = [t if t is None else t.double() for t in tensors]
    size = 0.0

    def oracle(*arguments, **keywords):
        nonlocal size
        losses = case.oracle(*arguments, **keywords)
        if not case.reduces or reduction == "none":
            return losses
        size = (losses.abs().sum() if reduction == "sum" else losses.abs().mean()).item()
        if reduction == "sum":
            return losses.sum()
        if case.counted is None:
            return losses.mean()
        return losses.sum() / max(case.counted(*others), 1)

    reduced = options if reduction is None else options | {"reduction": reduction}
    truth, truth_grads = call(oracle, exact, others, options)
    chosen = {"backend": backend} if takes_backend(case) else {}
    dense_choice = {"backend": "eager"} if takes_backend(case) else {}
    # 16-bit inputs are held to the float32 formula; only the rounding of the gradient is theirs.
    compute = torch.promote_types(dtype, torch.float32)
    dense_inputs = [t if t is None else t.to(compute) for t in tensors]
    dense, dense_grads = call(case.loss, dense_inputs, others, reduced | dense_choice)
    got, grads = call(case.loss, tensors, others, reduced | chosen)
    assert got.dtype == compute
    assert_close("value", got, truth, dense, compute, size)
    for index, (grad, exact_grad, dense_grad) in enumerate(
        zip(grads, truth_grads, dense_grads, strict=True)
    ):
        assert grad.dtype == dtype
        assert_close(f"gradient {index}", grad, exact_grad, dense_grad, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=names)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_equals_the_oracle(case, backend, dtype, shape, usable):
    usable(backend)
    if shape[0] * shape[1] > case.largest:
        shape = (shape[0] // 3, shape[1] // 3, shape[2])
    compare(case, backend, dtype, shape, seed=sum(shape))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if c.reduces], ids=names)
def test_reductions(case, backend, reduction, usable):
    usable(backend)
    compare(case, backend, torch.float32, (9, 14, 7), seed=3, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("case", [c for c in CASES if c.tile], ids=names)
def test_in_passes(case, dtype, in_passes, usable):
    usable("cpu")
    compare(case, "cpu", dtype, (23, 27, 18), seed=11)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", [c for c in CASES if c.tile], ids=names)
def test_many_panels(case, reduction, small_panels, usable):
    usable("cpu")
    shape = (26, 29, 18) if case.largest < 10_000 else (61, 141, 18)
    extra = {"reduction": reduction} if case.reduces else {}
    compare(case, "cpu", torch.float32, shape, seed=7, **extra)
