"""Rows of 16-bit inputs as a GPU multiplies them: exactly, at the rate of 16-bit operands.

These objects stand for a matrix of rows in the passes over panels, which use slices, `shape`,
`dtype`, `device`, `new_empty` and `new_zeros` alone. `scored` and `graded` are what is multiplied.
"""

import torch

from fastsim.precision import power_of_two

# What is written in float16 is scaled by a power of two: the largest number, or the bound on it,
# comes into [2^14, 2^15), half the range. One that is 2^28 times smaller is still normal.
LARGEST = 2.0**14
# |dL_i/dlogit| at most, of the kinds of small batches.
LARGEST_GRADIENT = {"softmax": 1, "sigmoid": 1, "hard_triplet": 2, "semi-hard_triplet": 2}


class HalfRows:
    """values: the operand (N, D) of scores; rest: (N,) what these lack, or None."""

    rest = None

    def __init__(self, values, dtype):
        self.values = values
        self.shape, self.dtype, self.device = values.shape, dtype, values.device

    def __len__(self):
        return self.shape[0]

    def new_empty(self, shape, dtype=None):
        return self.values.new_empty(shape, dtype=dtype or self.dtype)

    def new_zeros(self, shape, dtype=None):
        return self.values.new_zeros(shape, dtype=dtype or self.dtype)

    def is_contiguous(self):
        """False: they are no place for a gradient, which is float32."""
        return False


class ScaledRows(HalfRows):
    """Unit rows as float16 operands, and what is left of 1 / norm.

    A power of two brings the norm of each into (1, 2], which changes no bit that a cosine shows;
    the rest of 1 / norm, in [0.5, 1), multiplies the float32 sum: x / |x| = rest * values.
    """

    def __init__(self, values, rest):
        super().__init__(values, values.dtype)
        self.rest = rest

    def __getitem__(self, rows):
        return ScaledRows(self.values[rows], self.rest[rows])


class DotRows(HalfRows):
    """bfloat16 rows as they are for scores, and as float16 for the products of score gradients.

    float16 has eight times the precision of bfloat16, which score gradients need, and not its
    range: the rows are size * graded, a power of two for all of them.
    """

    def __init__(self, values, graded):
        super().__init__(values, graded.dtype)
        self.graded = graded

    def __getitem__(self, rows):
        return DotRows(self.values[rows], self.graded[rows])


def dot_rows(x, operand):
    """(`DotRows` of bfloat16 x (N, D), size ()); operand: of a matrix, as its products want it."""
    largest = x.abs().amax() if len(x) else x.new_zeros(())
    size = (power_of_two(largest.float()) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return DotRows(operand(x), operand((x / size).to(torch.float16))), size


def scored(rows):
    """(the operand of scores, the rest (N,) that they lack or None)."""
    return (rows.values, rows.rest) if isinstance(rows, HalfRows) else (rows, None)


def graded(rows):
    """The operand of products with score gradients."""
    return rows.graded if isinstance(rows, DotRows) else scored(rows)[0]
