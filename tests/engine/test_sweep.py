"""A sum over prefixes in one sweep: value and gradients against float64 oracles, width by width."""

import pytest
import torch
from torch.library import opcheck

import fastsim
from fastsim import losses
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.engine import sweep
from tests.cases import BY_NAME, call, inputs
from tests.measure import assert_close, conditioning
from tests.threads import assert_same_bits

WIDTHS, WEIGHTS = (34, 17, 5), (1.0, 0.5, 2.0)
BACKENDS = ("cpu",)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SERVED = (
    "info_nce",
    "info_nce-cold",
    "info_nce-symmetric",
    "info_nce-exclude",
    "info_nce-positives",
    "info_nce-everything",
    "info_nce-dot",
    "sup_con",
    "siglip",
    "siglip-soft",
    "siglip-dot",
    "siglip-groups",
    "matrix_cross_entropy-soft",
    "matrix_mse-soft",
)
NOT_SERVED = ("info_nce-above", "info_nce-smooth", "info_nce-guide", "nt_xent", "circle")


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """No batch counts as small."""
    monkeypatch.setattr(CpuBackend, "sweep_pays", lambda *_: True)
    monkeypatch.setattr(CpuBackend, "sums_prefixes", lambda *_: False)


def in_one_sweep(loss, *, served=True):
    """The sum over the widths of a loss function, in a sweep."""

    def function(*arguments, **options):
        with sweep.sum_over(WIDTHS, WEIGHTS) as asked:
            value = loss(*arguments, **options)
        assert asked.served == served
        return value

    return function


def width_by_width(loss):
    """The same by its definition."""

    def function(*arguments, **options):
        values = []
        for width in WIDTHS:
            cut = [a[:, :width] if is_embedding(a) else a for a in arguments]
            values.append(loss(*cut, **options))
        return sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True))

    return function


def is_embedding(value):
    return torch.is_tensor(value) and value.dim() == 2 and value.shape[1] == WIDTHS[0]


def compare(name, backend, dtype, shape, seed=5, *, independent=False):
    case = BY_NAME[name]
    tensors, others, options = inputs(case, shape, dtype, seed=seed)
    compute = torch.promote_types(dtype, torch.float32)
    sizes = []

    def oracle(*arguments, **keywords):
        losses = case.oracle(*arguments, **keywords)
        sizes.append(losses.abs().mean().item())
        return losses.mean() if case.counted is None else losses.sum() / case.counted(*others)

    def dense(tensors):
        given = options | {"backend": "eager"}
        value, grads = call(width_by_width(case.loss), tensors, others, given)
        return [value, *grads]

    wide = [t if t is None else t.double() for t in tensors]
    truth, truth_grads = call(width_by_width(oracle), wide, others, options)
    size = sum(weight * size for weight, size in zip(WEIGHTS, sizes, strict=True))
    narrow, *narrow_grads = dense([t if t is None else t.to(compute) for t in tensors])
    moved = [torch.finfo(compute).eps * move for move in conditioning(dense, wide)]
    given = options | {"backend": backend}
    got, grads = call(in_one_sweep(case.loss), tensors, others, given)
    assert got.dtype == compute
    assert_close("value", got, truth, narrow, compute, size, moved[0])
    found = zip(grads, truth_grads, narrow_grads, moved[1:], strict=True)
    for place, (grad, exact, of_dense, move) in enumerate(found):
        assert grad.dtype == dtype
        assert_close(
            f"gradient {place}", grad, exact, of_dense, dtype, moved=move, independent=independent
        )


def test_what_is_kept_of_the_full_width_is_not_taken_for_the_sum(usable):
    """A loss is kept by signature; a sum over its prefixes has the same arguments."""
    usable("cpu")
    x, y = torch.randn(9, 34), torch.randn(9, 34)
    full = losses.info_nce(x, y, backend="cpu")
    in_one_sweep(losses.info_nce)(x, y, backend="cpu")
    assert losses.info_nce(x, y, backend="cpu") == full


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, backend, dtype, small_panels, usable):
    usable(backend)
    compare(name, backend, dtype, (41, 53, WIDTHS[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["info_nce", "info_nce-everything", "siglip-groups"])
def test_blocks_of_columns(name, backend, small_panels, usable):
    usable(backend)
    compare(name, backend, torch.float32, (29, 71, WIDTHS[0]))


PARTS = (373, 521)  # two of rows and of columns of a block (csrc/cpu/sweep.cpp)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["info_nce-symmetric", "siglip-groups", "matrix_mse-soft"])
def test_parts_of_blocks(name, backend, usable):
    usable(backend)
    compare(name, backend, torch.float32, (*PARTS, WIDTHS[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda p, backend: losses.InfoNCE(temperature=p[0], margin=0.1, backend=backend),
        lambda p, backend: losses.InfoNCE(
            temperature=p[0], margin=0.1, symmetric=True, backend=backend
        ),
        lambda p, backend: losses.InfoNCE(temperature=p[0], similarity="dot", backend=backend),
        lambda p, backend: losses.SigLIP(scale=p[0], bias=p[1], backend=backend),
    ],
)
def test_what_is_learnt(make, backend, small_panels, usable):
    usable(backend)
    sides = [torch.randn(23, WIDTHS[0], dtype=torch.float64) for _ in range(2)]

    def gradients(backend):
        learnt = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, -0.7)]
        loss = losses.Matryoshka(make(learnt, backend), WIDTHS, WEIGHTS)
        value = loss(*sides)  # of embeddings that want none
        value.backward()
        return [value, *(v.grad for v in learnt if v.grad is not None)]

    for got, wanted in zip(gradients(backend), gradients("eager"), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_of_any_length(symmetric, backend, usable):
    """Norms at both ends of the range, prefixes that are nearly nothing, prefixes of zeros."""
    usable(backend)
    x, y = torch.randn(2, 13, WIDTHS[0])
    x[0], y[1], x[2] = x[0] * 1e-35, y[1] * 1e30, 0
    x[3, :5] *= 1e-30
    y[3, :17] *= 1e-30
    x[4, :5] = y[5, :17] = 0
    options = {"symmetric": symmetric, "temperature": 0.3}
    sizes = []

    def results(function, sides, backend):
        """The value, and each row of the gradients in units of the true one's norm."""
        value, grads = call(function, sides, [], options | {"backend": backend})
        if not sizes:
            norms = (torch.linalg.vector_norm(grad, dim=1, keepdim=True) for grad in grads)
            sizes.extend(torch.where(norm == 0, 1.0, norm) for norm in norms)
        return [value, *(grad.double() / size for grad, size in zip(grads, sizes, strict=True))]

    def dense(sides):
        return results(width_by_width(fastsim.info_nce), sides, "eager")

    wide = [x.double(), y.double()]
    truth = dense(wide)
    moved = (torch.finfo(torch.float32).eps * move for move in conditioning(dense, wide))
    got = results(in_one_sweep(fastsim.info_nce), [x, y], backend)
    for parts in zip(got, truth, dense([x, y]), moved, strict=True):
        found, exact, of_dense, move = parts
        assert_close("value or gradient", found, exact, of_dense, torch.float32, moved=move)
    assert not got[1][2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(34, 17, 1), (34, 2, 1), (3, 2, 1), (34, 17, 2)], ids=str)
@pytest.mark.parametrize(
    "name", ["info_nce", "info_nce-symmetric", "info_nce-dot", "siglip", "sup_con"]
)
def test_short_prefixes(name, widths, backend, monkeypatch, usable):
    """A prefix of one number has gradient 0, divided by that number, which may be small."""
    usable(backend)
    monkeypatch.setattr(f"{__name__}.WIDTHS", widths)
    for seed in range(3):
        # The dense formula divides the rounding of a gradient of 0: its error says nothing.
        compare(name, backend, torch.float32, (41, 53, widths[0]), seed, independent=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_not_finite(number, backend, usable):
    usable(backend)
    x, y = torch.randn(2, 9, WIDTHS[0])
    x[4, 20] = number  # of the widest prefix alone
    for loss in (fastsim.info_nce, fastsim.siglip):
        assert in_one_sweep(loss)(x, y, backend=backend).isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("panels", ["small", "large"])
@pytest.mark.parametrize("name", ["info_nce", "info_nce-symmetric", "siglip"])
def test_same_bits_with_any_number_of_threads(name, panels, backend, request, usable):
    usable(backend)
    if panels == "small":
        request.getfixturevalue("small_panels")
    shape = (61, 64) if panels == "small" else PARTS
    tensors, others, options = inputs(BY_NAME[name], (*shape, WIDTHS[0]), torch.float32, seed=2)
    loss, given = in_one_sweep(BY_NAME[name].loss), options | {"backend": backend}

    def results():
        value, grads = call(loss, tensors, others, given)
        return [value, *grads]

    assert_same_bits(results, (1, 2))


def is_the_loss_of_the_widest(name, backend):
    case = BY_NAME[name]
    tensors, others, options = inputs(case, (6, 8, WIDTHS[0]), torch.float64, seed=3)
    options["backend"] = backend
    got = call(in_one_sweep(case.loss, served=False), tensors, others, options)
    torch.testing.assert_close(got, call(case.loss, tensors, others, options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_the_loss_of_the_widest(name, backend, usable):
    usable(backend)
    is_the_loss_of_the_widest(name, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck(wanted, backend, monkeypatch, usable):
    usable(backend)
    calls = []
    original = sweep._sweep

    def recorded(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(sweep, "_sweep", recorded)
    x, y = (torch.randn(7, WIDTHS[0], requires_grad=want) for want in wanted)
    for loss in (fastsim.info_nce, fastsim.siglip):
        in_one_sweep(loss)(x, y, backend=backend)
    in_one_sweep(fastsim.sup_con)(x, torch.arange(7) // 2, backend=backend)
    assert len(calls) == 3
    for arguments in calls:
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        opcheck(original.operator, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_and_derived_again(backend, usable):
    usable(backend)
    module = losses.Matryoshka(losses.InfoNCE(symmetric=True, backend=backend), WIDTHS, WEIGHTS)
    x, y = torch.randn(2, 7, WIDTHS[0], dtype=torch.float64)
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(traced, [x, y], [], {}), call(module, [x, y], [], {}))

    def penalty(loss):
        a = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(a, y), a, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), a)[0]

    eager = losses.Matryoshka(losses.InfoNCE(symmetric=True, backend="eager"), WIDTHS, WEIGHTS)
    torch.testing.assert_close(penalty(module), penalty(eager))
