"""Products of bfloat16 operands with float32 sums: on a processor's matrix unit (Intel AMX), or by
its AVX512_BF16 instruction (on AMD), which multiplies pairs of numbers.

An operand is split into a sum of bfloat16 parts of 8 bits each. One part holds a bfloat16, two hold
a float16, so the products of 16-bit rows are exact. Three parts hold all 24 bits of a float32.
torch.get_float32_matmul_precision() decides how many of them are used: "highest" three (six
products, more accurate than a sum of float32 products), "high" two (three products), "medium" one.
AVX512_BF16 is only twice as fast as float32 products, so it multiplies operands of one part alone;
operands of more parts are multiplied in float32.
"""

import math

import torch

from fastsim.backends.cpu.lazy_rows import LazyUnitRows
from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.precision import float32_products

# Read once, as torch.compile cannot trace an operator that takes no tensor.
MOST_PARTS = 0 if UNAVAILABLE else torch.ops.fastsim_cpu.amx_most_parts()
ALL_PARTS = 3  # together they hold all bits of a float32
_PARTS = {"highest": ALL_PARTS, "high": 2, "medium": 1}
CACHED = 20 << 20  # the most bytes of packed rows that are kept from panel to panel
DEPTH = 1024  # rows or columns packed at a time, again for every panel, if they exceed CACHED


def name():
    """The name of the instructions in use, or ""."""
    return torch.ops.fastsim_cpu.amx_name()


def is_matrix_unit():
    """Whether the instructions in use multiply operands of several parts too."""
    return MOST_PARTS > 1


def parts(dtype):
    """The number of bfloat16 parts of an operand of this dtype; 0 if it is not split."""
    if dtype == torch.float64:
        return 0
    if dtype == torch.float32:
        count = _PARTS[float32_products("cpu")]
    else:
        count = 1 if dtype == torch.bfloat16 else 2
    return count if count <= MOST_PARTS else 0


def parts_of(rows):
    """The number of parts of an operand: `ScaledRows`, `LazyUnitRows` or a tensor.

    AVX512_BF16 multiplies `ScaledRows` alone: it has one part, and a tensor may hold unit rows of
    float16 inputs, which need two.
    """
    return parts(rows.dtype) if is_matrix_unit() or isinstance(rows, ScaledRows) else 0


def serves_sweep(count):
    """Whether products of so many parts are the fastest ones for a sweep over prefixes.

    A sweep in float32 computes its products in pieces that stay in a near cache with the scores of
    all widths. That is faster than whole panels by products of all parts.
    """
    return 0 < count < ALL_PARTS


def score_grad_parts(dtype):
    """The number of parts of the score gradients that multiply rows of this dtype.

    Two for bfloat16, so that the only rounding to bfloat16 is that of the gradient itself.
    """
    return 2 if dtype == torch.bfloat16 else parts(dtype)


def with_unit_stride(x):
    """x (N, D) with stride 1 along a row: x itself, or a copy if its stride differs.

    `contiguous` does not guarantee that stride for D = 1.
    """
    return x if x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)


class ScaledRows:
    """Rows x (N, D) and two factors (N,) that make them unit rows: x / |x| = rest * (power * x).

    power is a power of two that brings the norm into [1, 2), so multiplying by it is exact. rest,
    in (0.5, 1], is the remaining factor of 1 / |x|; it multiplies the float32 sum of a product.
    """

    def __init__(self, values, powers, rest, *, inverse=None, keeps=True):
        """inverse: (N,) factors from power * x to unit rows; None: computed when they are needed.
        keeps: whether the rows may stay packed from panel to panel.
        """
        self.values, self.powers, self.rest, self._inverse = values, powers, rest, inverse
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device
        self.keeps, self._right = keeps, None

    @classmethod
    def of(cls, x):
        """(`ScaledRows` of x (N, D), inverse norms (N,)); both factors of a zero row are 0."""
        values = with_unit_stride(x)
        inverse, powers, rest = x.new_empty(3, x.shape[0], dtype=torch.float32)
        torch.ops.fastsim_cpu.amx_norms(values, inverse, powers, rest)
        return cls(values, powers, rest, inverse=rest), inverse

    @classmethod
    def as_they_are(cls, x):
        """`ScaledRows` of x (N, D) for dot products: both factors are 1."""
        ones = x.new_ones(x.shape[0], dtype=torch.float32)
        return cls(with_unit_stride(x), ones, ones)

    @classmethod
    def of_norms(cls, x, norms):
        """`ScaledRows` that stand for x / norms.

        x: (N, d), some columns of longer rows. norms: (N,) float64, the norms of the longer rows.
        """
        fraction, exponent = torch.frexp(norms)  # in [0.5, 1)
        usable = norms.isfinite()
        powers = torch.ldexp(torch.ones_like(norms), 1 - exponent).where(usable, 1.0)
        rest = (0.5 / fraction).where(usable, torch.nan)
        zero = norms < torch.finfo(torch.float32).tiny
        powers, rest = (t.masked_fill(zero, 0.0).float() for t in (powers, rest))
        return cls(with_unit_stride(x), powers, rest, inverse=rest)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        if isinstance(rows, slice) and rows.indices(len(self)) == (0, len(self), 1):
            return self
        # The rows of a block are multiplied once, so they need not stay packed.
        inverse = None if self._inverse is None else self._inverse[rows]
        parts = self.values[rows], self.powers[rows], self.rest[rows]
        return ScaledRows(*parts, inverse=inverse, keeps=False)

    def new_empty(self, *shape, dtype):
        return self.values.new_empty(*shape, dtype=dtype)

    def is_contiguous(self):
        """False: a gradient must not overwrite these rows, whose memory is the caller's."""
        return False

    def inverse(self):
        """The factors (N,) from power * x to unit rows: the rest, or 1 / norm for dot products."""
        if self._inverse is None:
            self._inverse = ScaledRows.of(self.values)[1]
        return self._inverse

    def right(self):
        """The rows packed as the right operand of a panel, which stay packed.

        None if they may not stay packed, or take more than CACHED bytes.
        """
        if self._right is None and self.keeps and _packed_bytes(self) <= CACHED:
            library, count = torch.ops.fastsim_cpu, parts(self.dtype)
            size = library.amx_right_size(*self.shape, count)
            packed = self.values.new_empty(size, dtype=torch.int16)
            library.amx_pack_right(self.values, self.powers, count, packed)
            self._right = packed
        return self._right


def keep_first(operands):
    """Lets the first of several `ScaledRows` stay packed, as many as fit into CACHED together."""
    total = 0
    for rows in operands:
        total += _packed_bytes(rows)
        rows.keeps = total <= CACHED


def _packed_size(rows):
    """(rows, numbers in a row) of packed rows; the parts of a row lie side by side."""
    group = torch.ops.fastsim_cpu.amx_group()
    count, width = (-(-size // group) * group for size in rows.shape)
    return count, width * parts(rows.dtype)


def _packed_bytes(rows):
    return 2 * math.prod(_packed_size(rows))


class PackedColumns:
    """The right operand of score panels: `ScaledRows`, `LazyUnitRows` or a float32 tensor.

    It is packed once if it then takes at most CACHED bytes. Otherwise slices of it are packed again
    for every panel.
    """

    def __init__(self, columns):
        self.values, self.powers, self.rest = columns, None, None
        if isinstance(columns, ScaledRows):
            self.values, self.powers, self.rest = columns.values, columns.powers, columns.rest
        count, width = _packed_size(columns)
        keeps = not isinstance(columns, ScaledRows) or columns.keeps
        self.packed_once = keeps and _packed_bytes(columns) <= CACHED
        shape = count if self.packed_once else DEPTH, width
        self.tiles = torch.empty(shape, dtype=torch.int16, device=columns.device)
        # The products of the parts of an infinite number do not add up to the right result. That
        # does not matter for cosines, whose row is then NaN in any case.
        self.usable = self.powers is not None
        self._unit_rows = None  # memory for unit rows until they are packed
        if self.packed_once or not self.usable:
            finite = [self._pack(part) for part in self._parts(0, len(columns))]
            self.usable = self.usable or all(finite)
        if self.packed_once:
            self.values = self.powers = self._unit_rows = None  # frees their memory

    def _parts(self, first, count):
        """The slices in which `count` columns from `first` on are packed."""
        step = len(self.tiles) or 1  # a rank of a group may have no columns
        end = first + count
        return [slice(start, min(start + step, end)) for start in range(first, end, step)]

    def _pack(self, columns):
        values, powers = self.values, self.powers
        if isinstance(values, LazyUnitRows):
            if self._unit_rows is None:
                shape = min(len(self.tiles), len(values)), values.shape[1]
                self._unit_rows = self.tiles.new_empty(shape, dtype=values.dtype)
            values = values.make(columns, self._unit_rows)
        else:
            values = values[columns]
        group = torch.ops.fastsim_cpu.amx_group()
        tiles = self.tiles[: -(-len(values) // group) * group]
        powers = None if powers is None else powers[columns]
        return torch.ops.fastsim_cpu.amx_pack(values, powers, tiles)

    def scores(self, rows, first, panel, add):
        """Writes the scores of `rows` and the columns from `first` on to the panel; `add` adds them
        instead. Returns False and does nothing if rows that are not `ScaledRows` are not finite.
        """
        left = rows, None, None
        if isinstance(rows, ScaledRows):
            left = rows.values, rows.powers, rows.rest
        if self.packed_once:
            return self._scores(left, self.tiles[first:], slice(first, None), panel, add)
        for columns in self._parts(first, panel.shape[1]):
            self._pack(columns)
            part = panel[:, columns.start - first : columns.stop - first]
            if not self._scores(left, self.tiles, columns, part, add):
                return False  # at the first slice: whether the rows are finite decides
        return True

    def _scores(self, left, tiles, columns, panel, add):
        rest = None if self.rest is None else self.rest[columns]
        return torch.ops.fastsim_cpu.amx_scores(*left, tiles, rest, panel, add)


def multiply(panel, right, out, transposed, accumulate):
    """out = panel @ right, or panel.T @ right if `transposed`; `accumulate` adds it to out instead.

    right: a float32 tensor, or `ScaledRows`, which stand for their unit rows.
    """
    right_parts, panel_parts = parts(right.dtype), score_grad_parts(right.dtype)
    operand = right, None, None, None, None
    if isinstance(right, ScaledRows):
        inverse = right.inverse() if right_parts < panel_parts else None
        operand = right.values, right.powers, right.right(), right.rest, inverse
    torch.ops.fastsim_cpu.amx_multiply(
        panel, *operand, out, transposed, accumulate, panel_parts, right_parts, DEPTH
    )
