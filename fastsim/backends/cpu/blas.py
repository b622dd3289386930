"""Products of float32 panels by the BLAS library that torch is built with.

Taken where that library has a unit of the processor to itself: on Apple's processors a matrix unit
that only Apple's Accelerate reaches. Anywhere else the kernels are as fast or faster. The platform
decides, never a time that was measured, so that every process gets the same bits.
FASTSIM_BLAS=0 takes the kernels everywhere, FASTSIM_BLAS=1 the library.
"""

import os
import platform

import torch

from fastsim.backends.cpu import amx
from fastsim.backends.cpu.unmade import BAND, UnitRows

VARIABLE = "FASTSIM_BLAS"


def wanted(wish, system, machine):
    """Whether the library makes the products that AMX does not; wish: of the variable."""
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: wanted 0 or 1, got {wish}")
    return wish == "1" or (not wish and (system, machine) == ("Darwin", "arm64"))


IN_USE = wanted(os.environ.get(VARIABLE, ""), platform.system(), platform.machine())


def serves(rows):
    """Whether the library multiplies an operand: `UnitRows` or a tensor."""
    return rows.dtype == torch.float32 and IN_USE and not amx.parts_of(rows)


def scores(rows, columns, first, panel, add):
    """Fills the panel of `rows` against the columns from `first` on, or adds to it.

    columns: unit rows (M, D), or `UnitRows`, of which some are made at a time.
    """
    wide = panel.shape[1]
    if not isinstance(columns, UnitRows):
        return _product(rows, columns[first : first + wide].t(), panel, add)
    made = panel.new_empty(min(BAND, wide), rows.shape[1], dtype=rows.dtype)
    for at in range(0, wide, BAND):
        part = slice(first + at, first + min(at + BAND, wide))
        _product(rows, columns.make(part, made).t(), panel[:, at : at + BAND], add)


def multiply(left, right, out, accumulate):
    """out = left @ right, or added to it."""
    _product(left, right, out, accumulate)


# With an output given, autocast has no say in these.
def _product(left, right, out, add):
    if add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)
