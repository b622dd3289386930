"""Products of float32 panels by the BLAS library that torch is built with.

It is used on Apple's processors, whose matrix unit only Apple's Accelerate can use. Elsewhere the
kernels are as fast or faster. The platform decides, never a measured time, so that every process
gets the same bits. FASTSIM_BLAS=0 selects the kernels everywhere, FASTSIM_BLAS=1 the library.
"""

import os
import platform

import torch

from fastsim.backends.cpu import amx
from fastsim.backends.cpu.lazy_rows import BAND, LazyUnitRows

VARIABLE = "FASTSIM_BLAS"


def wanted(value, system, machine):
    """Whether the library computes the products that AMX does not.

    value: the value of FASTSIM_BLAS. system, machine: as `platform` names them.
    """
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: wanted 0 or 1, got {value}")
    return value == "1" or (not value and (system, machine) == ("Darwin", "arm64"))


IN_USE = wanted(os.environ.get(VARIABLE, ""), platform.system(), platform.machine())


def serves(rows):
    """Whether the library computes the products of this operand."""
    return rows.dtype == torch.float32 and IN_USE and not amx.parts_of(rows)


def scores(rows, columns, first, panel, add):
    """Writes the scores of `rows` and the columns from `first` on to the panel; `add` adds them
    instead.

    columns: (M, D), or `LazyUnitRows`, of which `BAND` are computed at a time.
    """
    wide = panel.shape[1]
    if not isinstance(columns, LazyUnitRows):
        return _product(rows, columns[first : first + wide].t(), panel, add)
    memory = panel.new_empty(min(BAND, wide), rows.shape[1], dtype=rows.dtype)
    for left in range(0, wide, BAND):
        part = slice(first + left, first + min(left + BAND, wide))
        _product(rows, columns.make(part, memory).t(), panel[:, left : left + BAND], add)


def multiply(left, right, out, accumulate):
    """out = left @ right; `accumulate` adds the product to out instead."""
    _product(left, right, out, accumulate)


# `out` also keeps autocast from converting the operands.
def _product(left, right, out, add):
    if add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)
