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
    assert fields.keys() <= record.__dict__.keys(), fields.keys() - record.__dict__.keys()
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new
