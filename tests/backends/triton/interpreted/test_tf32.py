"""Operands of TF32 are rounded to nearest: what tensor cores leave out would be cut off."""

import math

import pytest
import torch

from fastsim.backends import get

DIGITS = 11  # significant bits of TF32


def nearest(value):
    """The numbers of 11 significant bits that are nearest to a number, both of a tie."""
    fraction, exponent = math.frexp(value)
    steps = fraction * 2**DIGITS
    ends = {math.floor(steps), math.ceil(steps)}
    least = min(abs(steps - end) for end in ends)
    return {math.ldexp(end, exponent - DIGITS) for end in ends if abs(steps - end) == least}


def operands(x, precision_name, precision):
    precision(precision_name)
    backend = get("triton")
    return backend.tile_rows(x)[0], backend.operand(x, x.dtype), backend.plain_rows(x)[0]


@pytest.mark.parametrize("name", ["high", "medium"])
def test_operands_are_rounded_to_nearest(name, precision):
    x = torch.randn(9, 21) * torch.logspace(-9, 9, 9)[:, None]
    for rounded, exact in zip(
        operands(x, name, precision), operands(x, "highest", precision), strict=True
    ):
        assert not torch.equal(rounded, exact)
        for got, number in zip(rounded.flatten().tolist(), exact.flatten().tolist(), strict=True):
            assert got in nearest(number)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy, in place of the GPU
def test_what_is_no_number_stays(precision):
    x = torch.tensor([[torch.inf, 1.0], [-torch.nan, 1.0]])
    _, rounded, plain = operands(x, "high", precision)
    assert torch.equal(rounded.nan_to_num(nan=7.0), x.nan_to_num(nan=7.0))
    assert torch.equal(plain.isnan(), x.isnan())
    assert operands(x, "high", precision)[0].isnan()[:, 0].all()
