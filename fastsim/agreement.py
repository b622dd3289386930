"""The ranks of a group agree on a call before they exchange data.

A rank that refuses its arguments never leaves the others waiting: it reports its error in the first
exchange of the group. Every rank then raises an error that names the rank and its reason.
"""

import hashlib
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fastsim.groups import all_gather, exchange_device

_calls = threading.local()  # `open`: the group of a call on which the ranks have not agreed yet

# Columns of the table that the ranks exchange; each rank gives one row.
_FAILED, _DIGEST, _OTHERS = 0, 1, 2


class RankError(RuntimeError):
    """Another rank of the group refused its arguments, or failed before it could exchange data."""


@contextmanager
def failures_are_told(group):
    """Reports an error of the block to the other ranks if the ranks have not agreed yet."""
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
    """The `numbers` of every rank, one list for each, if all ranks call with the same `said`.

    said: {name: text}, what has to be the same on all ranks.
    last: whether data follow, so that a later error can no longer be reported; otherwise another
        exchange follows.

    Raises on every rank: ValueError with the name and both values if they differ; RankError if
    another rank has failed.
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
    """Answers the exchange in which the other ranks wait with this rank's error."""
    exchange(group, [1])
    _messages(group, f"{type(error).__name__}: {error}")


class Failures:
    """Raises an error of one rank on every rank: there itself, elsewhere as a RankError naming it.

    `caught()` keeps an error of its block. `tell()` raises on every rank if any rank has kept one;
    all ranks have to call it at the same places.
    group: None for one process; errors are then raised where they happen.
    """

    def __init__(self, group):
        self.group, self.error = group, None

    @contextmanager
    def caught(self):
        """Keeps an error of the block for `tell`."""
        try:
            yield
        except Exception as error:
            # If the group itself has failed, nothing can be sent over it.
            if self.group is None or isinstance(error, dist.DistError):
                raise
            self.error = error

    def tell(self):
        """Raises if any rank has kept an error."""
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
    """Raises an error of the block on every rank, as `Failures` does."""
    failures = Failures(group)
    with failures.caught():
        yield
    failures.tell()


# The width of the table is fixed: a rank that has failed does not know what the others send.
_WIDTH = 6


def exchange(group, numbers):
    """The table of integers (ranks, _WIDTH), as lists, to which each rank gives its `numbers`."""
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
    """A value as text, to compare it between ranks; the values of a GPU's tensor are not read."""
    if isinstance(value, torch.Tensor):
        learnt = " (learnt)" if value.dim() == 0 and value.requires_grad else ""
        if value.dim() == 0 and value.device.type == "cpu":
            return f"{value.item()!r}{learnt}"
        return f"a tensor of {value.dtype}{learnt}"
    if isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
        return f"({', '.join(map(describe, value))})"
    return repr(tuple(value)) if isinstance(value, torch.Size) else repr(value)
