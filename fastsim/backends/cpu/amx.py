"""Products of bfloat16 operands with float32 sums: on a processor's matrix unit (Intel AMX), or by
its AVX512_BF16 instruction (on AMD), which multiplies pairs of numbers.

An operand is taken as the sum of bfloat16 parts of 8 bits each. 16-bit rows are multiplied as they
are: one part holds a bfloat16, two a float16, so that their products are exact. Three parts hold
all 24 bits of a float32; torch.get_float32_matmul_precision() says how many count: "highest" three
(six products, more accurate than a sum of float32 products), "high" two (three products), "medium"
one. AVX512_BF16 is twice as fast as products of float32 numbers, so one part is all that pays:
operands of more are multiplied in float32.
"""

import math

import torch

from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.backends.cpu.unmade import UnitRows
from fastsim.precision import float32_products

# Read once: torch.compile traces no operator without a tensor.
MOST_PARTS = 0 if UNAVAILABLE else torch.ops.fastsim_cpu.amx_most_parts()
_PARTS = {"highest": 3, "high": 2, "medium": 1}
CACHED = 20 << 20  # bytes of packed rows that are kept from panel to panel
DEPTH = 1024  # of more, as many rows or columns are packed at a time, for every panel again


def name():
    """The instructions in use, or ""."""
    return torch.ops.fastsim_cpu.amx_name()


def is_matrix_unit():
    """Whether operands of several parts are multiplied too."""
    return MOST_PARTS > 1


def parts(dtype):
    """The bfloat16 parts of an operand of that dtype; 0 for products of float32 numbers."""
    if dtype == torch.float64:
        return 0
    if dtype == torch.float32:
        wanted = _PARTS[float32_products("cpu")]
    else:
        wanted = 1 if dtype == torch.bfloat16 else 2
    return wanted if wanted <= MOST_PARTS else 0


def parts_of(rows):
    """The parts of an operand: `ScaledRows`, `UnitRows` or a tensor.

    A tensor may hold rows that were float16, which one part does not hold: AVX512_BF16 multiplies
    `ScaledRows` alone.
    """
    return parts(rows.dtype) if is_matrix_unit() or isinstance(rows, ScaledRows) else 0


def score_grad_parts(dtype):
    """The parts of score gradients that multiply rows of that dtype.

    Two at bfloat16, whose own rounding is then that of the gradient.
    """
    return 2 if dtype == torch.bfloat16 else parts(dtype)


def side_by_side(x):
    """x (N, D) with the numbers of a row side by side.

    `contiguous` leaves the only number of a row whatever stride it has.
    """
    return x if x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)


class ScaledRows:
    """Rows as they came, and what makes unit rows of them where their cosines are wanted.

    A power of two brings the norm of each into [1, 2), which changes no bit of it; the rest of
    1 / norm, in (0.5, 1], multiplies what is summed in float32: x / |x| = rest * (power * x).
    """

    def __init__(self, values, powers, rest, *, inverse=None, keeps=True):
        """inverse: what makes unit rows of (power * x), (N,); None: it is found where it is wanted.
        keeps: whether they may stay packed from panel to panel.
        """
        self.values, self.powers, self.rest, self._inverse = values, powers, rest, inverse
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device
        self.keeps, self._right = keeps, None

    @classmethod
    def of(cls, x):
        """(rows of x (N, D), inverse norms (N,)); zero rows have power, rest and inverse 0."""
        values = side_by_side(x)
        inverse, powers, rest = x.new_empty(3, x.shape[0], dtype=torch.float32)
        torch.ops.fastsim_cpu.amx_norms(values, inverse, powers, rest)
        return cls(values, powers, rest, inverse=rest), inverse

    @classmethod
    def as_they_are(cls, x):
        """Rows of x (N, D) for scores that are no cosines: products of the rows themselves."""
        ones = x.new_ones(x.shape[0], dtype=torch.float32)
        return cls(side_by_side(x), ones, ones)

    @classmethod
    def of_norms(cls, x, norms):
        """Rows x (N, d), parts of rows with the float64 norms (N,), over these norms."""
        fraction, exponent = torch.frexp(norms)  # in [0.5, 1)
        usable = norms.isfinite()
        powers = torch.ldexp(torch.ones_like(norms), 1 - exponent).where(usable, 1.0)
        rest = (0.5 / fraction).where(usable, torch.nan)
        zero = norms < torch.finfo(torch.float32).tiny
        powers, rest = (t.masked_fill(zero, 0.0).float() for t in (powers, rest))
        return cls(side_by_side(x), powers, rest, inverse=rest)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        if isinstance(rows, slice) and rows.indices(len(self)) == (0, len(self), 1):
            return self
        # Of a block, which are multiplied once.
        inverse = None if self._inverse is None else self._inverse[rows]
        parts = self.values[rows], self.powers[rows], self.rest[rows]
        return ScaledRows(*parts, inverse=inverse, keeps=False)

    def new_empty(self, *shape, dtype):
        return self.values.new_empty(*shape, dtype=dtype)

    def is_contiguous(self):
        """False: their memory is the caller's, and no place for a gradient."""
        return False

    def inverse(self):
        """What makes unit rows of (power * x), (N,): the rest, or of rows as they are 1 / norm."""
        if self._inverse is None:
            self._inverse = ScaledRows.of(self.values)[1]
        return self._inverse

    def right(self):
        """Packed as the right operand of a panel and kept; None where that takes much memory."""
        if self._right is None and self.keeps and _packed_bytes(self) <= CACHED:
            library, count = torch.ops.fastsim_cpu, parts(self.dtype)
            size = library.amx_right_size(*self.shape, count)
            packed = self.values.new_empty(size, dtype=torch.int16)
            library.amx_pack_right(self.values, self.powers, count, packed)
            self._right = packed
        return self._right


def keep_first(of_widths):
    """Lets `ScaledRows` of several widths stay packed, as many as there is room for together."""
    taken = 0
    for rows in of_widths:
        taken += _packed_bytes(rows)
        rows.keeps = taken <= CACHED


def _packed_size(rows):
    """(count, numbers of each) of rows as they are packed, all parts side by side."""
    group = torch.ops.fastsim_cpu.amx_group()
    count, width = (-(-size // group) * group for size in rows.shape)
    return count, width * parts(rows.dtype)


def _packed_bytes(rows):
    return 2 * math.prod(_packed_size(rows))


class PackedColumns:
    """The right operand of score panels, `ScaledRows`, `UnitRows` or a float32 tensor: packed once,
    or if that takes much memory a part at a time for every panel.
    """

    def __init__(self, columns):
        self.values, self.powers, self.rest = columns, None, None
        if isinstance(columns, ScaledRows):
            self.values, self.powers, self.rest = columns.values, columns.powers, columns.rest
        count, width = _packed_size(columns)
        keeps = not isinstance(columns, ScaledRows) or columns.keeps
        self.once = keeps and _packed_bytes(columns) <= CACHED
        shape = count if self.once else DEPTH, width
        self.tiles = torch.empty(shape, dtype=torch.int16, device=columns.device)
        # An infinite entry has no parts whose products add up to what it gives; that of a cosine
        # makes NaN of its row in any case.
        self.usable = self.powers is not None
        self._made = None  # memory for unit rows until they are packed
        if self.once or not self.usable:
            finite = [self._pack(part) for part in self._parts(0, len(columns))]
            self.usable = self.usable or all(finite)
        if self.once:
            self.values = self.powers = self._made = None  # their memory with them

    def _parts(self, first, count):
        """Slices of columns that are packed together."""
        most = len(self.tiles) or 1  # one rank of a group may have no columns
        return [
            slice(at, min(at + most, first + count)) for at in range(first, first + count, most)
        ]

    def _pack(self, columns):
        values, powers = self.values, self.powers
        if isinstance(values, UnitRows):
            if self._made is None:
                most = min(len(self.tiles), len(values))
                self._made = self.tiles.new_empty(most, values.shape[1], dtype=values.dtype)
            values = values.make(columns, self._made)
        else:
            values = values[columns]
        group = torch.ops.fastsim_cpu.amx_group()
        tiles = self.tiles[: -(-len(values) // group) * group]
        of_part = None if powers is None else powers[columns]
        return torch.ops.fastsim_cpu.amx_pack(values, of_part, tiles)

    def scores(self, rows, first, panel, add):
        """Fills the panel of `rows` against the columns from `first` on, or adds to it; False if it
        cannot.
        """
        left = rows, None, None
        if isinstance(rows, ScaledRows):
            left = rows.values, rows.powers, rows.rest
        if self.once:
            return self._scores(left, self.tiles[first:], slice(first, None), panel, add)
        for columns in self._parts(first, panel.shape[1]):
            self._pack(columns)
            part = panel[:, columns.start - first : columns.stop - first]
            if not self._scores(left, self.tiles, columns, part, add):
                return False  # of the first part: it is the rows that are not finite
        return True

    def _scores(self, left, tiles, columns, panel, add):
        rest = None if self.rest is None else self.rest[columns]
        return torch.ops.fastsim_cpu.amx_scores(*left, tiles, rest, panel, add)


def multiply(panel, right, out, transposed, accumulate):
    """out = panel @ right, with `transposed` panel.T @ right, or added to it.

    right: `ScaledRows`, for the product with their unit rows, or a float32 tensor.
    """
    count, of_panel = parts(right.dtype), score_grad_parts(right.dtype)
    operand = right, None, None, None, None
    if isinstance(right, ScaledRows):
        inverse = right.inverse() if count < of_panel else None
        operand = right.values, right.powers, right.right(), right.rest, inverse
    torch.ops.fastsim_cpu.amx_multiply(
        panel, *operand, out, transposed, accumulate, of_panel, count, DEPTH
    )
