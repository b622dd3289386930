"""Backends that do what no backend should."""

import os
import time

import torch

from fastsim.backends.torch.backend import TorchBackend


class Fake(TorchBackend):
    """The torch backend under another name."""

    name = "fake"
    automatic = False
    by_verdict = True


class Lying(Fake):
    name = "lying"

    def multiply(self, left, right, out, *, accumulate):
        super().multiply(left, right, out, accumulate=accumulate)
        out.mul_(1.001)


class Hanging(Fake):
    name = "hanging"

    def unit_rows(self, x, dtype=None):
        time.sleep(600)


class Crashing(Fake):
    name = "crashing"

    def unit_rows(self, x, dtype=None):
        os.abort()


class Raising(Fake):
    name = "raising"

    def unit_rows(self, x, dtype=None):
        raise RuntimeError("an illegal memory access was encountered")


class Wavering(Fake):
    """Right within rounding, and never the same."""

    name = "wavering"
    calls = 0

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        grad, dots = super().unit_rows_backward(grad_unit, x, inverse, factor, dtype)
        Wavering.calls += 1
        return grad * (1 + (Wavering.calls % 3) * torch.finfo(torch.float32).eps / 2), dots


class Spilling(Fake):
    """Writes behind a tensor that it has made."""

    name = "spilling"

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        grad, dots = super().unit_rows_backward(grad_unit, x, inverse, factor, dtype)
        made = x.new_empty(8)
        if made.untyped_storage().nbytes() > made.nbytes:  # else it would be someone else's
            made.as_strided((1,), (1,), made.storage_offset() + 8).fill_(1.0)
        return grad, dots


class Telling(Fake):
    """Says at which precision float32 products are made."""

    name = "telling"

    def unsupported_reason(self, *tensors, kind=None):
        return f"it multiplies at {torch.get_float32_matmul_precision()}"


class Bare(Fake):
    """Has none of the extras."""

    name = "bare"
    extras = frozenset()


class Deaf(Fake):
    """NaN is not seen."""

    name = "deaf"

    def unit_rows(self, x, dtype=None):
        return super().unit_rows(x.nan_to_num(0.0), dtype)


ALL = (
    *(Fake(), Lying(), Hanging(), Crashing(), Raising()),
    *(Wavering(), Spilling(), Deaf(), Bare(), Telling()),
)
