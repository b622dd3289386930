"""Block sizes by architecture, operand and depth, in a static table: no call tunes sizes.

The entries compile without spills, except for a few registers of some kernels on sm_90, where wide
parts were faster on an H200 in spite of these. `python -m bench.compile_report` shows the registers
of each kernel, `python -m bench.tune_triton` times other sizes.
"""

import functools
from typing import NamedTuple

import torch

from fastsim.precision import float32_products

LINE = 128  # bytes: unit rows are padded to whole lines, which are also whole steps in depth
PANEL_LINE = 64  # elements: rows of a panel are whole lines, which are aligned for library products


class BlockSizes(NamedTuple):
    """The sizes of a tile of scores, and how a program runs it.

    rows, columns: the sizes of the tile.
    depth: the features in one step of its product.
    group: the rows of tiles that share columns in the cache (`product.tile_of_program`).
    warps, stages: those of a program.
    width: a light epilogue takes the tile in parts of this many columns. A heavy epilogue takes it
        in parts of half or a quarter as many.
    break_even: from this number of features on it is faster to avoid a product. A fused pass then
        keeps scores in 16 bits instead of computing them again (`break_even` of `kept_sizes`). A
        forward pass that compares x with itself takes half the tiles.
    descriptors: whether operands are read by tensor descriptors (TMA), which sm_90 and later have.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    width: int
    break_even: int
    descriptors: bool = False

    def with_more_warps(self):
        """The sizes for an epilogue that needs more registers than a program of four warps has."""
        return self._replace(warps=max(8, self.warps))


# {(architecture, kind of operand, depth bucket): sizes}, for `block_sizes`. Entries with "kept" in
# the place of the bucket are for `kept_sizes`. The sizes of float16 on sm_90 are the fastest that
# `python -m bench.tune_triton` found on an H200; the others are computed, not measured.
#
# Full float32 products on NVIDIA use no tensor cores. With 32 sums for each thread there are
# registers for two programs on a multiprocessor, if operands are read by pointers; descriptors need
# more. For float16 on NVIDIA two programs of four warps are resident, so that one multiplies while
# the other runs its epilogue. Consumer cards have shared memory for two programs of 48 KB. On
# sm_100, whose products keep the scores outside the registers, half the columns leave registers for
# two programs. A launch that keeps scores runs one program of eight warps at a time; with fewer
# than `break_even` features, to keep scores costs more than it saves.
TABLE = {
    ("sm_90", "float16", "deep"): BlockSizes(128, 128, 64, 8, 4, 3, 64, 1280, True),
    ("sm_90", "float16", "kept"): BlockSizes(128, 256, 64, 8, 8, 3, 64, 512, True),
    ("sm_90", "float16", "shallow"): BlockSizes(128, 128, 64, 8, 8, 3, 64, 320, True),
    ("sm_90", "tf32", "deep"): BlockSizes(128, 128, 32, 8, 8, 3, 32, 320, True),
    ("sm_90", "float32", "deep"): BlockSizes(64, 128, 32, 8, 8, 2, 32, 320),
    ("sm_100", "float16", "deep"): BlockSizes(128, 64, 64, 8, 4, 4, 32, 1280, True),
    ("sm_80", "float16", "deep"): BlockSizes(128, 128, 32, 8, 4, 4, 32, 1024),
    ("sm_80", "tf32", "deep"): BlockSizes(128, 128, 32, 8, 8, 3, 32, 256),
    ("sm_80", "float32", "deep"): BlockSizes(64, 128, 16, 8, 8, 3, 32, 256),
    ("sm_86", "float16", "deep"): BlockSizes(128, 128, 32, 8, 4, 4, 32, 2048),
    ("gfx942", "float16", "deep"): BlockSizes(128, 128, 64, 8, 8, 2, 32, 512),
    ("gfx942", "tf32", "deep"): BlockSizes(128, 128, 32, 8, 8, 2, 32, 512),
    ("gfx942", "float32", "deep"): BlockSizes(128, 128, 32, 8, 8, 2, 32, 512),
    ("interpreter", "float16", "deep"): BlockSizes(16, 32, 64, 2, 4, 1, 16, 0, True),
    ("interpreter", "tf32", "deep"): BlockSizes(16, 32, 32, 2, 4, 1, 8, 0),
    ("interpreter", "float32", "deep"): BlockSizes(16, 32, 32, 2, 4, 1, 8, 0),
}
# {architecture: the architecture whose entries it takes}. The entries of sm_86 are for consumer
# cards, which have 100 KB of shared memory for all programs of a multiprocessor.
SAME_SIZES = dict.fromkeys(("sm_87", "sm_89", "sm_120", "sm_121"), "sm_86") | {"sm_103": "sm_100"}
SHALLOW = 256  # features of rows whose epilogue outweighs the product, at most


def bucket(depth):
    """The part of a key of the table that depends on the depth."""
    return "shallow" if depth <= SHALLOW else "deep"


def operand_kind(dtype, architecture):
    """The kind of operand: "float16", or for float32 rows "float32" or "tf32", as torch is set.

    Among AMD's GPUs only gfx942 multiplies TF32.
    """
    if dtype.itemsize == 2:
        return "float16"
    without_tf32 = architecture.startswith("gfx") and architecture != "gfx942"
    return "float32" if without_tf32 or float32_products("cuda") == "highest" else "tf32"


def block_sizes(architecture, operand, depth):
    """The entry of the table. An unknown architecture takes the entry of the nearest known one."""
    architecture = _table_name(architecture, operand)
    deep = TABLE[architecture, operand, "deep"]
    return TABLE.get((architecture, operand, bucket(depth)), deep)


def kept_sizes(architecture, operand, depth):
    """`block_sizes` for a launch that keeps scores."""
    sizes = block_sizes(architecture, operand, depth).with_more_warps()
    return TABLE.get((_table_name(architecture, operand), operand, "kept"), sizes)


def _table_name(architecture, operand):
    """The name of the architecture whose entries of the table serve this one."""
    architecture = SAME_SIZES.get(architecture, architecture)
    if (architecture, operand, "deep") in TABLE:
        return architecture
    return "gfx942" if architecture.startswith("gfx") else "sm_80"


@functools.cache
def architecture(device):
    """The name of the device's architecture; "interpreter" for a CPU."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    # Code for 9.0 uses instructions that later architectures dropped.
    return f"sm_{properties.major}{properties.minor}"
