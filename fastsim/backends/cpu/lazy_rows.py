"""Unit rows that are computed whenever they are read.

They serve operands that only a product of scores reads, and take no memory for all unit rows.
"""

import torch

from fastsim.precision import compute_dtype

BAND = 1024  # rows whose norms are computed at a time


class LazyUnitRows:
    """Unit rows of x (N, E), computed whenever they are read, bit for bit `CpuBackend.unit_rows`.

    dtype: the dtype of the unit rows. inverse: (N,) inverse norms, 0 for a zero row.
    """

    def __init__(self, x):
        self.values, self.shape, self.device = x, x.shape, x.device
        self.dtype = compute_dtype(x)
        self.inverse = x.new_empty(x.shape[0], dtype=self.dtype)
        memory = x.new_empty(min(BAND, len(self)), x.shape[1], dtype=self.dtype)
        for first in range(0, len(self), BAND):
            self.make(slice(first, first + BAND), memory)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        values = self.values[rows]
        return self.make(rows, values.new_empty(values.shape, dtype=self.dtype))

    def make(self, rows, memory):
        """The unit rows of the slice `rows`, written to the first rows of `memory`."""
        values, inverse = self.values[rows], self.inverse[rows]
        unit = memory[: len(values)]
        torch.ops.fastsim_cpu.unit_rows(values, unit, inverse)
        return unit

    def from_row(self, first):
        """(rows of x, inverse norms) from the row `first` on."""
        return self.values[first:], self.inverse[first:]
