"""Records that differ in a few fields."""

import dataclasses

import torch


def replaced(record, **fields):
    """`dataclasses.replace` of a frozen record without its constructor.

    That sets field by field, which of a record as long as `Tile` or `Pairs` takes longer than the
    loss of a small batch saves.
    """
    if torch.compiler.is_compiling():  # which knows the constructor, and not in every release this
        return dataclasses.replace(record, **fields)
    assert fields.keys() <= record.__dict__.keys(), fields.keys() - record.__dict__.keys()
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new
