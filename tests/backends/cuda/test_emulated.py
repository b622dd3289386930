"""Every loss through the CUDA backend, its kernels emulated, against oracles and dense formulas."""

import os

import pytest
import torch

import fastsim
from fastsim import losses
from tests.cases import BY_NAME, CASES, call, inputs
from tests.losses.test_losses import compare, names
from tests.measure import assert_close, conditioning

# The engine for sm_90 takes 16-bit inputs alone; float32 is the other engine's.
PORTABLE = os.environ.get("FASTSIM_EMULATED_ENGINE") != "hopper"
DTYPES = (torch.float32, torch.float16) if PORTABLE else (torch.float16,)
TILES = [case for case in CASES if case.tile]
MANY = (150, 270, 70)  # two by three tiles, ragged
DEEP = (300, 500, 330)  # four tiles for each of two clusters, ragged, of more steps than stages
SHAPE = MANY if PORTABLE else DEEP


@pytest.mark.skipif(not PORTABLE, reason="float32 operands have one engine")
@pytest.mark.parametrize("case", TILES, ids=names)
def test_equals_the_oracle(case):
    shape = (26, 30, 34) if case.largest < 67 * 75 else (67, 75, 34)
    compare(case, "cuda", torch.float32, shape, seed=11)


def orders(count):
    """As late as it may, and so many random orders, of emulator/machine.h."""
    return [1, *torch.randint(2, 2**31, (count,)).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("case", TILES, ids=names)
def test_many_tiles_equal_the_formula_in_every_order(case, dtype, monkeypatch):
    tensors, others, options = inputs(case, SHAPE, dtype, seed=5)
    first, *further = orders(1)
    monkeypatch.setenv("FASTSIM_EMULATED_ORDER", str(first))
    value, grads = call(case.loss, tensors, others, options | {"backend": "cuda"})
    for order in further:
        monkeypatch.setenv("FASTSIM_EMULATED_ORDER", str(order))
        again, grads_again = call(case.loss, tensors, others, options | {"backend": "cuda"})
        assert torch.equal(again, value), order
        assert all(map(torch.equal, grads_again, grads)), order
    if case.loss is fastsim.full_triplet and dtype == torch.float16:
        return  # rounding to float16 may choose another of two close negatives than the formula
    # The dense formula of cosent_matrix compares every pair of scores with every other.
    eager = options | {"backend": "cpu" if case.loss is fastsim.cosent_matrix else "eager"}

    def results(sides):
        value, grads = call(case.loss, sides, others, eager)
        return [value, *grads]

    exact = [t if t is None else t.double() for t in tensors]
    dense = results([t if t is None else t.float() for t in tensors])
    # Both operands of the scores and the panel of score gradients are rounded to the type.
    half = torch.finfo(dtype).eps / 2
    moved = (half * move for move in conditioning(results, exact))
    for parts in zip((value, *grads), results(exact), dense, moved, strict=True):
        got, wanted, theirs, move = parts
        assert_close("value or gradient", got, wanted, theirs, dtype, moved=move)


@pytest.mark.skipif(not PORTABLE, reason="float32 operands have one engine")
def test_tf32(precision):
    case = BY_NAME["info_nce-symmetric"]
    tensors, others, options = inputs(case, (40, 150, 70), torch.float32, seed=7)
    precision("high")
    value, _ = call(case.loss, tensors, others, options | {"backend": "cuda"})
    exact = [t.double() for t in tensors]
    truth, _ = call(case.loss, exact, others, options | {"backend": "eager"})
    # A cosine of operands rounded to 11 bits, times the scale of 20.
    assert 0 < (value - truth).abs() <= 20 * 2 * 2.0**-11


@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_closest_negative(mining):
    x, y = torch.randn(140, 24), torch.randn(300, 24)
    y[280] = y[7]  # the smaller column among equals, in another tile
    y[200:202] = y[140:142]
    x, y = (t.half() for t in (x, y))
    values, indices = losses.closest_negative(x, y, mining=mining, backend="cuda")
    unit_x, unit_y = (torch.nn.functional.normalize(t.double()) for t in (x, y))
    scores = unit_x @ unit_y.T
    rounding = 4 * torch.finfo(torch.float16).eps
    for i, (value, j) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
        ceiling = scores[i, i] if mining == "semi-hard" else 2.0
        sure = [s for k, s in enumerate(scores[i].tolist()) if k != i and s <= ceiling - rounding]
        if sure:
            assert j != i
            assert abs(value - scores[i, j]) <= rounding
            assert max(sure) - rounding <= scores[i, j] <= ceiling + rounding
        assert j not in (200, 201)
        assert i == 7 or j != 280


def test_a_copy_of_the_positive_is_semi_hard():
    x = torch.randn(140, 40, dtype=torch.float16)
    _, indices = losses.closest_negative(x, torch.cat([x, x]), mining="semi-hard", backend="cuda")
    assert indices.tolist() == list(range(140, 280))


@pytest.mark.parametrize("temperature", [0.001, 100.0])
def test_any_temperature_is_finite(temperature):
    x, y = (torch.randn(20, 12).half().requires_grad_() for _ in "xy")
    for options in ({"symmetric": True}, {"symmetric": False}):
        loss = losses.info_nce(x, y, temperature=temperature, backend="cuda", **options)
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert y.grad.isfinite().all()


@pytest.mark.parametrize("case", TILES, ids=names)
def test_nan_reaches_the_loss(case):
    tensors, others, options = inputs(case, (20, 33, 12), torch.float16, seed=2)
    tensors[0][3, 5] = torch.nan
    assert not case.loss(*tensors, *others, **options, backend="cuda").isfinite()
