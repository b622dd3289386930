"""The edges of the Triton backend, under the interpreter."""

import pytest
import torch

from fastsim import losses
from fastsim.backends import get, pick
from tests.measure import assert_close

HALF, SINGLE = torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("either_way")


def tile_losses(x, y, temperature=0.05, part=None):
    """Every tile loss on these rows, or a part of them."""
    groups, others = torch.arange(len(x)) % 5, torch.arange(len(y)) % 5
    scale, sides, grouped = 1 / temperature, (x, y), (x, groups, y, others)
    calls = [
        (losses.info_nce, sides, {"temperature": temperature, "symmetric": True}),
        (losses.siglip, sides, {"scale": scale}),
        (losses.matrix_cross_entropy, (*sides, None), {"temperature": temperature}),
        (losses.matrix_mse, (*sides, None), {}),
        (losses.full_triplet, sides, {}),
        (losses.nt_xent, grouped, {"temperature": temperature}),
        (losses.multi_similarity, grouped, {"beta": scale}),
        (losses.cosent_matrix, (*sides, None), {"scale": scale}),
    ]
    for loss, given, options in calls[part or slice(None)]:
        yield loss(*given, **options, backend="triton")


@pytest.mark.parametrize("temperature", [0.001, 100.0])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_any_temperature_is_finite(temperature, dtype):
    x, y = (torch.randn(9, 12).to(dtype).requires_grad_() for _ in "xy")
    for loss in tile_losses(x, y, temperature):
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert y.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy, in place of the GPU's maximum
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("where", ["row", "column"])
def test_nan_reaches_the_loss(where, dtype):
    x, y = torch.randn(9, 12, dtype=dtype), torch.randn(33, 12, dtype=dtype)
    (x if where == "row" else y)[-1 if where == "column" else 3, 5] = torch.nan
    x.requires_grad_()
    for loss in tile_losses(x, y):
        x.grad = None
        loss.backward()
        assert loss.isnan()
        assert x.grad[3].isnan().any()


def test_zero_rows():
    x, y = (torch.randn(20, 12, requires_grad=True) for _ in "xy")
    with torch.no_grad():
        x[2], y[7] = 0, 0
    for loss in tile_losses(x, y):
        loss.backward()
        assert loss.isfinite()
    assert x.grad[2].eq(0).all()
    assert y.grad[7].eq(0).all()
    assert x.grad.isfinite().all()


def test_batch_of_one():
    x, y = torch.randn(1, 8, requires_grad=True), torch.randn(1, 8)
    loss = losses.info_nce(x, y, backend="triton")
    loss.backward()
    assert loss.item() == 0
    assert x.grad.eq(0).all()


def test_everything_excluded():
    x, y = torch.randn(20, 12, requires_grad=True), torch.randn(40, 12, requires_grad=True)
    same = torch.zeros(20, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    for symmetric in (False, True):
        loss = losses.info_nce(x, y, exclude=same, symmetric=symmetric, backend="triton")
        loss.backward()
        assert loss.item() == 0
        assert x.grad.eq(0).all()
        assert y.grad.eq(0).all()


def test_large_and_small_gradients_of_16_bit_inputs():
    """The power of two in the panel keeps a loss scaled by an autocast scaler, or a tiny one."""
    x, y = torch.randn(20, 24, dtype=HALF), torch.randn(20, 24, dtype=HALF)
    grads = []
    for factor in (1.0, 65536.0, 2.0**-20):
        a, b = x.float().requires_grad_(), y.float().requires_grad_()
        loss = losses.info_nce(a.half(), b.half(), symmetric=True, backend="triton")
        (loss * factor).backward()
        grads.append(a.grad / factor)
    assert (grads[0] - grads[1]).abs().max() <= 2e-3 * grads[0].abs().max()
    assert grads[2].isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
def test_the_same_bits_again(shared):
    x, y = torch.randn(37, 24), torch.randn(50, 24)
    positives = torch.randint(0, 50, (37,)) if shared else None

    def run():
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = losses.info_nce(a, b, positives, symmetric=True, backend="triton")
        loss.backward()
        return loss.detach(), a.grad, b.grad

    assert all(map(torch.equal, run(), run()))


def test_compile_fullgraph():
    x, y = (torch.randn(20, 12, requires_grad=True) for _ in "xy")

    def loss(a, b):
        return losses.info_nce(a, b, symmetric=True, backend="triton")

    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, y).backward()
    compiled = x.grad.clone(), y.grad.clone()
    x.grad = y.grad = None
    loss(x, y).backward()
    assert torch.equal(x.grad, compiled[0])
    assert torch.equal(y.grad, compiled[1])


def test_unsupported_reasons():
    triton = get("triton")
    assert triton.unsupported_reason(torch.zeros(2, 2)) is None
    assert "float64" in triton.unsupported_reason(torch.zeros(2, 2, dtype=torch.float64))
    assert "CPU tensors" in triton.unsupported_reason(torch.zeros(2, 2, device="meta"))
    assert not triton.automatic
    assert pick(None, torch.zeros(2, 2)).name != "triton"


def gradients(loss, x, y, targets, backend):
    x, y = (side.clone().requires_grad_() for side in (x, y))
    loss(x, y, targets, backend=backend).backward()
    return x.grad, y.grad


@pytest.mark.parametrize("loss", [losses.matrix_mse, losses.matrix_cross_entropy])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [1e-4, 1, 100, 30_000])
def test_targets_of_any_size(loss, dtype, largest):
    """The loss scale of float16 score gradients measures them."""
    if dtype == torch.int8 and not 1 <= largest <= 127:
        pytest.skip("int8 does not hold it")
    x, y = torch.randn(20, 12).half(), torch.randn(33, 12).half()
    targets = (largest * (2 * torch.rand(20, 33) - 1)).to(dtype)
    targets[0, 0] = largest
    truth = gradients(loss, x.double(), y.double(), targets, "eager")
    dense = gradients(loss, x, y, targets, "eager")
    found = gradients(loss, x, y, targets, "triton")
    for got, wanted, plain in zip(found, truth, dense, strict=True):
        assert_close("gradient", got, wanted, plain, HALF)


def test_single_precision_over_several_blocks_of_columns(monkeypatch):
    """Unit rows of a width without padding, which another block of columns reads again."""
    from fastsim.backends.triton import backend

    monkeypatch.setattr(backend, "PANEL", 1)
    monkeypatch.setattr(backend, "ROW_MULTIPLE", 16)
    monkeypatch.setattr(backend, "PART_COLUMNS", 32)
    x, y = torch.randn(40, 32), torch.randn(70, 32)

    def found(dtype, name):
        sides = [side.to(dtype, copy=True).requires_grad_() for side in (x, y)]
        losses.info_nce(*sides, symmetric=True, backend=name).backward()
        return [side.grad for side in sides]

    truth, dense = found(torch.float64, "eager"), found(SINGLE, "eager")
    for got, wanted, plain in zip(found(SINGLE, "triton"), truth, dense, strict=True):
        assert_close("gradient", got, wanted, plain, SINGLE)
