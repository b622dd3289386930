"""Cuts a column of a batch into micro-batches."""

from collections.abc import Mapping

import torch

from fastsim.checks import int_of


class MicroBatches(list):
    """A column that is already cut into micro-batches: a list of inputs of `encode`."""

    @classmethod
    def of(cls, column, size, name="column", empty=False):
        """Cuts a tensor, a mapping of tensors or a list of examples into parts of `size` rows.

        name: what error messages call the column. empty: whether a column may have no rows; the
        result is then one part without rows.
        """
        size = int_of("size", size, 1)
        _check_kind(name, column)
        tensors = list(_tensors(column))
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError(f"{name}: wanted tensors (N, ...), got a tensor of one number")
        counts = set(map(len, tensors if isinstance(column, Mapping) else [column]))
        if len(counts) != 1:
            came = sorted(counts) or "no tensor"
            raise ValueError(f"{name}: wanted tensors of equally many rows, got {came}")
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


def _tensors(column):
    """Yields the tensors of a column: itself, or the tensors in a mapping, which may be nested."""
    if isinstance(column, torch.Tensor):
        yield column
    elif isinstance(column, Mapping):
        for value in column.values():
            yield from _tensors(value)


def _rows(column, start, stop):
    """The rows from `start` to `stop` of a column, in each tensor of a mapping."""
    if not isinstance(column, Mapping):
        return column[start:stop]
    return {
        key: _rows(value, start, stop) if isinstance(value, (torch.Tensor, Mapping)) else value
        for key, value in column.items()
    }
