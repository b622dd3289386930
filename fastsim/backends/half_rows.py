"""Rows of 16-bit inputs as operands of a GPU: exact, and as fast as 16-bit operands are.

In the passes over panels these objects stand for a matrix of rows. The passes use only slices,
`shape`, `dtype`, `device`, `new_empty` and `new_zeros`. `scored` and `graded` return the operands.
"""

import torch

from fastsim.precision import power_of_two

# Numbers are scaled by a power of two before they become float16, so that the largest, or the bound
# on it, is in [2^14, 2^15), half the range. A number 2^28 times smaller is still normal.
LARGEST = 2.0**14
# A bound on |dL_i/dlogit| for the kinds that small batches have.
LARGEST_GRADIENT = {"softmax": 1, "sigmoid": 1, "hard_triplet": 2, "semi-hard_triplet": 2}


class HalfRows:
    """values: (N, D) the operand of scores. rest: (N,) by which scores are multiplied, or None."""

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
        """False: a gradient, which is float32, cannot overwrite these rows."""
        return False


class ScaledRows(HalfRows):
    """Unit rows x / |x| = rest * values, with float16 operands `values`.

    values is x times a power of two that brings its norm into (1, 2]; this changes no bit that
    matters to a cosine. rest, in [0.5, 1), is the remaining factor of 1 / |x|. It multiplies the
    float32 sum.
    """

    def __init__(self, values, rest):
        super().__init__(values, values.dtype)
        self.rest = rest

    def __getitem__(self, rows):
        return ScaledRows(self.values[rows], self.rest[rows])


class DotRows(HalfRows):
    """bfloat16 rows for dot products: unchanged for scores, as float16 for score gradients.

    Score gradients need the precision of float16, eight times that of bfloat16. Its range is
    smaller, so the rows are size * graded, with one power of two `size` for all rows.
    """

    def __init__(self, values, graded):
        super().__init__(values, graded.dtype)
        self.graded = graded

    def __getitem__(self, rows):
        return DotRows(self.values[rows], self.graded[rows])


def dot_rows(x, operand):
    """(`DotRows` of bfloat16 x (N, D), size ()).

    operand: a function that lays out a matrix as its products need it.
    """
    largest = x.abs().amax() if len(x) else x.new_zeros(())
    size = (power_of_two(largest.float()) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return DotRows(operand(x), operand((x / size).to(torch.float16))), size


def scored(rows):
    """(the operand of scores, the factors (N,) of the scores or None)."""
    return (rows.values, rows.rest) if isinstance(rows, HalfRows) else (rows, None)


def graded(rows):
    """The operand of products with score gradients."""
    return rows.graded if isinstance(rows, DotRows) else scored(rows)[0]
