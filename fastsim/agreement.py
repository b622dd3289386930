"""Ranks agree on a call before they exchange data.

A rank whose arguments are refused never leaves the others waiting: it says so in the first exchange
of its group, and every rank raises, naming the rank and its reason.
"""

import hashlib
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fastsim.groups import all_gather, exchange_device

_calls = threading.local()  # `open`: the group of a call that has not agreed yet

# Columns of the table that the ranks exchange: a row of each.
_FAILED, _DIGEST, _OTHERS = 0, 1, 2


class RankError(RuntimeError):
    """Another rank of the group refused its arguments, or failed before it could exchange data."""


@contextmanager
def failures_are_told(group):
    """What is raised within, before the ranks have agreed, is told to the other ranks."""
    _calls.open = group
    try:
        yield
    except Exception as error:
        if _calls.open is not None:
            tell(group, error)
        raise
    finally:
        _calls.open = None


def agree(group, said, numbers, *, last=True):
    """The `numbers` of every rank, one list each, once all ranks call the same with `said`.

    said: {name: text}, what has to be the same on all ranks. ValueError on every rank, with the
    name and both values, where it is not; RankError where another rank has failed. last: whether
    data follow, so that a later error can no longer be told; else another exchange follows.
    """
    digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
    before = getattr(_calls, "open", None)
    _calls.open = None  # what is raised here is raised on all ranks
    table = exchange(group, [0, int.from_bytes(digest, "big"), *numbers])
    if any(row[_FAILED] for row in table):
        _raise(_messages(group, None))
    if len({row[_DIGEST] for row in table}) > 1:
        _refuse(said, group)
    if not last:
        _calls.open = before
    return [row[_OTHERS : _OTHERS + len(numbers)] for row in table]


def tell(group, error):
    """Answers the exchange that the other ranks wait in, with this rank's error."""
    exchange(group, [1])
    _messages(group, f"{type(error).__name__}: {error}")


class Failures:
    """What fails on one rank is raised on every rank: its own error, or a RankError that names it.

    `caught()`: an error within is kept, and what follows is left to the other ranks. `tell()`:
    every rank raises where one has an error; all ranks call it at the same places.
    group: None where there is one process; then errors are raised where they happen.
    """

    def __init__(self, group):
        self.group, self.error = group, None

    @contextmanager
    def caught(self):
        """Keeps an error."""
        try:
            yield
        except Exception as error:
            # Where the group itself has failed, nothing can be told over it.
            if self.group is None or isinstance(error, dist.DistError):
                raise
            self.error = error

    def tell(self):
        """Raises where a rank has an error."""
        if self.group is None:
            return
        table = exchange(self.group, [self.error is not None])
        if any(row[_FAILED] for row in table):
            mine = self.error and f"{type(self.error).__name__}: {self.error}"
            messages = _messages(self.group, mine)
            if self.error is not None:
                raise self.error
            _raise(messages)


@contextmanager
def raised_together(group):
    """What is raised within is raised on every rank, as by `Failures`."""
    failures = Failures(group)
    with failures.caught():
        yield
    failures.tell()


_WIDTH = 6  # of a row of the table; a rank that has failed does not know what the others send


def exchange(group, numbers):
    """A row of integers of every rank."""
    numbers = [*numbers, *[0] * (_WIDTH - len(numbers))]
    mine = torch.tensor([numbers], dtype=torch.int64, device="cpu")
    device = exchange_device(group)
    table = torch.empty(dist.get_world_size(group), _WIDTH, dtype=torch.int64, device=device)
    all_gather(table, mine.to(device), group)
    return table.tolist()


def _messages(group, mine):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return everyone


def _raise(messages):
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    raise RankError(f"another rank of the group has failed: {'; '.join(failed)}")


def _refuse(said, group):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, said, group)
    for other, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            one, two = everyone[0].get(name), theirs.get(name)
            if one != two:
                raise ValueError(
                    f"{name}: wanted the same on every rank of the group,"
                    f" got {one} on rank 0 and {two} on rank {other}"
                )


def describe(value):
    """What has to be the same on all ranks, as text; a tensor on a GPU is not waited for."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            return f"{value.item()!r}{' (learnt)' if value.requires_grad else ''}"
        return f"a tensor of {value.dtype}"
    if isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
        return f"({', '.join(map(describe, value))})"
    return repr(tuple(value)) if isinstance(value, torch.Size) else repr(value)
