"""Unit rows that are computed when they are read, for rows that only a product of scores reads."""

import torch

from fastsim.precision import compute_dtype

BAND = 1024  # rows whose norms are computed at a time


class UnitRows:
    """Unit rows of x (N, E), computed when they are read, with the bits of `CpuBackend.unit_rows`.

    dtype: that of the unit rows. inverse: (N,) 1 / norm, 0 for a zero row.
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
        """The unit rows of a slice, written to the first rows of the memory."""
        values, inverse = self.values[rows], self.inverse[rows]
        unit = memory[: len(values)]
        torch.ops.fastsim_cpu.unit_rows(values, unit, inverse)
        return unit

    def from_row(self, first):
        """(x, inverse norms) from a row on."""
        return self.values[first:], self.inverse[first:]
