"""Cuts a column of a batch into micro-batches."""

from collections.abc import Mapping

import torch

from fastsim.checks import int_of

_CUT = (torch.Tensor, list, Mapping)  # what is cut in a mapping; a tuple may be a setting


class MicroBatches(list):
    """A column that is already cut into micro-batches: a list of inputs of `encode`."""

    @classmethod
    def of(cls, column, size, name="column", empty=False):
        """Cuts a tensor, a list of examples or a mapping of these into parts of `size` rows.

        A mapping may be nested. Values in it of other types, such as a flag or a tuple, are in
        every part.

        name: what error messages call the column. empty: whether a column may have no rows; the
        result is then one part without rows.
        """
        size = int_of("size", size, 1)
        _check_kind(name, column)
        values = list(_values(column))
        if any(isinstance(value, torch.Tensor) and value.dim() == 0 for value in values):
            raise ValueError(f"{name}: wanted tensors (N, ...), got a tensor of one number")
        counts = set(map(len, values))
        if len(counts) != 1:
            came = sorted(counts) or "none"
            raise ValueError(f"{name}: wanted tensors and lists of equally many rows, got {came}")
        if 0 in counts and not empty:
            raise ValueError(f"{name}: wanted at least one row, got 0")
        starts = range(0, max(1, *counts), size)
        return cls(_rows(column, start, start + size) for start in starts)


def _check_kind(name, column):
    """Refuses a column that is neither a tensor, nor a mapping, nor a list of examples."""
    of_tensors = isinstance(column, tuple) and column and all(map(torch.is_tensor, column))
    if isinstance(column, (Mapping, torch.Tensor, list, tuple)) and not of_tensors:
        return
    kind = type(column).__name__
    if of_tensors:
        kind = "tuple of tensors: parts of the rows go into a mapping, rows into a list"
    raise TypeError(f"{name}: wanted a tensor, a mapping of tensors or a list, got {kind}")


def _values(column):
    """Yields what is cut: the column itself, or the tensors and lists in a mapping."""
    if not isinstance(column, Mapping):
        yield column
        return
    for value in column.values():
        if isinstance(value, _CUT):
            yield from _values(value)


def _rows(column, start, stop):
    """The rows from `start` to `stop` of a column, in each tensor and list of a mapping."""
    if not isinstance(column, Mapping):
        return column[start:stop]
    return {
        key: _rows(value, start, stop) if isinstance(value, _CUT) else value
        for key, value in column.items()
    }
