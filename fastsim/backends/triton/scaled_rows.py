"""Rows of 16-bit inputs as the kernels multiply them."""


class ScaledRows:
    """Rows of 16 bits as exact operands, and what makes unit rows of them.

    A power of two brings the norm of each into (1, 2], which changes no bit that a cosine shows;
    the rest of 1 / norm, in [0.5, 1), multiplies the float32 sum: x / |x| = rest * values.
    """

    def __init__(self, values, rest):
        self.values, self.rest = values, rest
        self.shape, self.dtype, self.device = values.shape, values.dtype, values.device

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return ScaledRows(self.values[rows], self.rest[rows])

    def new_empty(self, shape, dtype=None):
        return self.values.new_empty(shape, dtype=dtype)

    def new_zeros(self, shape, dtype=None):
        return self.values.new_zeros(shape, dtype=dtype)

    def is_contiguous(self):
        """False: they are no place for a gradient, which is float32."""
        return False


def values_and_rest(rows):
    """The operand of `ScaledRows` or of unit rows, and its rest or None."""
    return (rows.values, rows.rest) if isinstance(rows, ScaledRows) else (rows, None)
