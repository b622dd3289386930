"""Records that differ in a few fields."""

import dataclasses

import torch


def replaced(record, **fields):
    """`dataclasses.replace` of a frozen record, without its constructor.

    The constructor sets field by field. For records as long as `TileLoss` or `Pairs` that would be
    a large part of a small loss.
    """
    if torch.compiler.is_compiling():  # not every release of torch traces what follows
        return dataclasses.replace(record, **fields)
    new = object.__new__(type(record))
    values = new.__dict__
    values.update(record.__dict__)
    count = len(values)
    values.update(fields)
    assert len(values) == count, fields.keys() - record.__dict__.keys()
    return new
