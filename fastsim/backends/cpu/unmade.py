"""Unit rows that are made where they are looked at, for what no product but the scores reads."""

import torch

BAND = 1024  # rows at a time whose norms are found


class UnitRows:
    """Unit rows of x (N, E), any of which are made of it when they are asked for.

    The numbers are those of `CpuBackend.unit_rows`. dtype: theirs. inverse: (N,) 1 / norm, or 0.
    """

    def __init__(self, x):
        self.values, self.shape, self.device = x, x.shape, x.device
        self.dtype = torch.promote_types(x.dtype, torch.float32)
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
        """Those of a slice, in the first rows of the memory."""
        values, inverse = self.values[rows], self.inverse[rows]
        unit = memory[: len(values)]
        torch.ops.fastsim_cpu.unit_rows(values, unit, inverse)
        return unit

    def from_row(self, first):
        """(values, inverse norms) from a row on."""
        return self.values[first:], self.inverse[first:]
