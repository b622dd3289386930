"""The products on a processor's matrix unit (Intel AMX): bfloat16 operands, float32 sums.

A float32 operand is taken as the sum of bfloat16 parts of 8 bits each; three hold all of its 24
bits. torch.get_float32_matmul_precision() says how many count: "highest" three (six products, more
accurate than a sum of float32 products), "high" two (three products), "medium" one.
"""

import torch

_PARTS = {"highest": 3, "high": 2, "medium": 1}
DEPTH = GROUP = 32  # the operands' depth and rows are padded to a multiple


def name():
    """The set of matrix instructions in use, or ""."""
    return torch.ops.fastsim_cpu.amx_name()


def parts(dtype):
    """The bfloat16 parts of an operand of that dtype; 0 for products without the matrix unit."""
    if dtype != torch.float32 or not name():
        return 0
    return _PARTS[torch.get_float32_matmul_precision()]


def packed(columns, count):
    """(M, D) float32 as the right operand of `scores` in `count` parts; None if not all finite.

    An infinite entry has no parts whose products add up to what it gives.
    """
    rows, width = (-(-size // GROUP) * GROUP for size in columns.shape)
    tiles = torch.empty(rows, count * width, dtype=torch.int16)
    return tiles if torch.ops.fastsim_cpu.amx_pack(columns, tiles) else None


def scores(rows, tiles, panel):
    """panel = rows @ columns.T of packed columns; False, and nothing done, if not all is finite."""
    return torch.ops.fastsim_cpu.amx_scores(rows, tiles, panel)


def multiply(panel, right, out, transposed, accumulate, count):
    """out = panel @ right, with `transposed` panel.T @ right, or added to it."""
    torch.ops.fastsim_cpu.amx_multiply(panel, right, out, transposed, accumulate, count)
