"""No loss holds an N x N matrix: the rise of the peak in a fresh process, against what it may hold.

That follows from the shapes: operands of products (unit rows of a side, or a gradient that is added
to another) beside inputs and gradients, and panels of scores.
"""

from typing import NamedTuple

import pytest
import torch

from fastsim.backends.cpu import amx, amx_loss, blas, sizes
from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.backends.cpu.workspace import ODD
from fastsim.benchmark.cases import CASES, prefixes
from fastsim.benchmark.memory import MIB, rise

ROWS, WIDTH = 4096, 768
OPERAND = 4 * ROWS * WIDTH  # 12 MB; an N x N matrix is 64 MB
BAND = 512  # rows, the most in csrc/cpu/amx_blocks.h
OTHERS = 6 * MIB  # states of rows, a band's temporaries, pages of the allocator


class Held(NamedTuple):
    """operands: as above. scored: a guide or a teacher, whose rows are made unit rows as they are
    multiplied, with a panel of their own. kept: whether scores are kept from the first pass to the
    second. mirrored: whether kept scores have memory beside the panel. swept: whether there is a
    panel of each prefix.
    """

    operands: int = 1
    scored: int = 0
    kept: bool = False
    mirrored: bool = False
    swept: bool = False


# The unit rows of one side: those of the other become its gradient.
USUAL = Held()
# Computed in one call, whose unit rows become their gradient. With AVX-512 those of the other side
# are in memory, otherwise it is read as it is.
IN_ONE_CALL = Held(int(not UNAVAILABLE and torch.ops.fastsim_cpu.instruction_set() == "avx512"))
# x compared with itself.
MIRRORED = Held(mirrored=True)
HELD = {
    "info_nce": IN_ONE_CALL,
    "info_nce biased": IN_ONE_CALL,
    "info_nce learnt": IN_ONE_CALL,
    "siglip learnt": IN_ONE_CALL,
    "siglip": IN_ONE_CALL,
    "siglip groups": IN_ONE_CALL,
    "siglip weighed": IN_ONE_CALL,
    "decoupled_contrastive": IN_ONE_CALL,
    "debiased_contrastive": IN_ONE_CALL,
    "matrix_cross_entropy": IN_ONE_CALL,
    "matrix_mse": IN_ONE_CALL,
    "info_nce symmetric": Held(kept=True),
    "cosent_matrix": Held(kept=True),
    "sup_con": MIRRORED,
    "nt_xent": MIRRORED,
    "multi_similarity": MIRRORED,
    "circle": MIRRORED,
    # A part's gradient is made beside the sum of the others.
    "info_nce directions": Held(2),
    "info_nce own negatives": Held(2),
    "info_nce references": Held(2),
    "info_nce smoothed": Held(2),
    "info_nce guided": Held(scored=1),
    "distill": Held(scored=1),
    "distill margins": Held(scored=1),
    "info_nce prefixes": Held(swept=True),
}


def allowed(held):
    """Bytes beyond inputs and gradients."""
    shape = sizes.block_shape(ROWS, ROWS, True, sizes.SWEEP if held.swept else 1)
    panel = 4 * shape[0] * (shape[1] + ODD)
    if held.kept:
        panel = max(panel, 4 * sizes.KEPT)
    if held.mirrored:
        panel += 4 * sizes.KEPT
    if held.swept:
        panel *= len(prefixes(WIDTH))
    # Other products than the engine's own in float32 need their own form of the columns.
    operands = held.operands or int(blas.IN_USE or amx.parts(torch.float32) > 0)
    total = operands * OPERAND + panel + held.scored * (panel + 4 * shape[0] * WIDTH) + OTHERS
    if parts := amx.parts(torch.float32):
        # Of 2 bytes a number, packed for the scores; and for the gradient a part at a time.
        total += (1 + held.scored) * parts * OPERAND // 2 + amx.CACHED
        if held.kept:  # in one call; each thread packs the rows of its band twice
            bands = torch.get_num_threads() * 2 * parts * 2 * BAND * WIDTH
            total = max(total, amx_loss.KEPT + bands + OTHERS)
    return total


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.products[1]])
def test_peak_memory(name, usable):
    usable("cpu")
    assert rise(name, "fastsim cpu", ROWS, WIDTH) * MIB < allowed(HELD.get(name, USUAL))
