"""One batch over several processes: `group=` of the batch-wise losses.

Every rank of a torch.distributed process group passes its part of the batch: its rows (anchors) and
its columns (candidates), as many as it has. Rows stay on their rank. Columns and ids are gathered,
with a gradient: all_gather forward, reduce_scatter backward. State that a loss keeps for columns or
for the whole matrix (symmetric `info_nce`, `cosent_matrix`) is merged over the ranks. `cosent` and
`angle` gather only their scores.

`positives` are indices into the candidates of the same rank. A target matrix holds the rows of this
rank against the columns of all ranks, in the order of the ranks. The `references` of a loss by
groups are columns: each rank passes its part, which with `own_first` begins with its embeddings,
and its rows are compared with the references of all ranks. A row that two ranks pass counts twice.

Under torch.compile a loss with `group=` runs uncompiled, between the graphs around it.

A rank may have no rows, as at the end of an epoch. An error on one rank is raised on all of them
(fastsim/agreement.py), so that no rank waits for another.

DistributedDataParallel, which averages gradients, needs nothing further. For R ranks with N rows
together, the reduction "mean" weighs each row by R / N (N is whatever the loss takes its mean
over). So the average over the ranks is the mean over the whole batch, even if ranks have unequal
numbers of rows. With "sum" the values of the ranks add up to the sum over the whole batch. Losses
over all pairs of pairs have one value, the same on every rank.

With `Ring(group)` instead of the group, the columns travel from rank to rank. For M columns of
width D, a gathering rank holds M D embeddings, their unit rows and two gradients of that size. A
rank of a ring holds a few blocks of M D / R, but computes the scores twice and sends the columns
twice. Use it for columns that do not fit when gathered.

DTensors that are sharded by rows are parts in the same sense, over the group of their mesh; a
replicated DTensor counts as the tensor that it holds (fastsim/dtensor.py). The loss is then a
DTensor, and its gradients are those of one process; they need no averaging.

`fastsim.grad_cache` does the other half of a very large batch: it runs the encoder in
micro-batches.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fastsim.agreement import agree, describe, exchange, failures_are_told
from fastsim.batch_metrics import in_metrics
from fastsim.collectives import all_reduce_sum, gather, gather_values, know, sum_with_gradient
from fastsim.dtensor import any_dtensor, as_dtensor, is_dtensor, local_arguments
from fastsim.groups import Ring, process_group
from fastsim.operators import once_differentiable, traced, transformed
from fastsim.precision import compute_dtype
from fastsim.reduce import reduce

__all__ = ["Ring"]

P = ParamSpec("P")
R = TypeVar("R")

# Options that may be learnt, in the order in which every rank averages their gradients.
LEARNT = ("temperature", "scale", "bias", "margin")


@dataclass
class Batch:
    """The place of this rank's part in the whole batch. For one process the part is the whole.

    row_counts, column_counts: the numbers of rows and of columns of each rank.
    longest: the number of tokens of the longest text of any rank.
    """

    row_counts: list
    column_counts: list
    group: object = None
    ring: bool = False
    rank: int = 0
    longest: int = 0

    @property
    def ranks(self):
        """The number of ranks."""
        return len(self.row_counts)

    @property
    def rows(self):
        """The number of rows of all ranks."""
        return sum(self.row_counts)

    @property
    def columns(self):
        """The number of columns of all ranks."""
        return sum(self.column_counts)

    @property
    def own_rows(self):
        """The slice of this rank's rows among the rows of all ranks."""
        first = sum(self.row_counts[: self.rank])
        return slice(first, first + self.row_counts[self.rank])

    @property
    def first_column(self):
        """The index of this rank's first column among the columns of all ranks."""
        return sum(self.column_counts[: self.rank])

    @property
    def name(self):
        """The group's name, for registered operators; "" for one process."""
        return "" if self.group is None else self.group.group_name

    @property
    def mean_share(self):
        """The weight of a mean over this rank's rows in the average over the ranks."""
        return self.ranks * self.row_counts[self.rank] / self.rows

    def refuse_ring(self, reason):
        """Raises a ValueError for a `Ring`; reason: why columns cannot travel, to follow "as"."""
        if self.ring:
            raise ValueError(f"group: wanted a process group, as {reason}, got a Ring")

    def gather_rows(self, part):
        """The rows (N, ...) of all ranks from this rank's rows, differentiable; None stays None."""
        return part if self.group is None else gather(part, self.row_counts, self.group)

    def gather_columns(self, part):
        """The columns (M, ...) of all ranks from this rank's, differentiable; None stays None."""
        return part if self.group is None else gather(part, self.column_counts, self.group)

    def gather_both(self, rows, columns):
        """Rows and columns of all ranks; one tensor if both arguments are one tensor."""
        gathered = self.gather_rows(rows)
        return gathered, gathered if columns is rows else self.gather_columns(columns)

    def gather_values(self, part):
        """The values (K,) of all ranks; each rank may have any number of them."""
        if self.group is None:
            return part
        counts = [row[0] for row in exchange(self.group, [part.shape[0]])]
        return gather_values(part, counts, self.group)

    def reduce(self, losses, reduction, count=None):
        """This rank's share of the reduction.

        losses: those of this rank's rows, or of the rows of all ranks.
        count: an integer tensor (), this rank's part of the number that the mean divides by; None:
            the number of its rows.
        """
        if self.group is None:
            return reduce(losses, reduction, count)
        if losses.shape[0] == self.rows:
            losses = losses[self.own_rows]
        if reduction == "none":
            return losses
        return (losses * self.row_weights(reduction, losses, count)).sum()

    def row_weights(self, reduction, like, count=None):
        """The weight w with which sum_i w loss_i is the reduction; None for "none".

        count: as in `reduce`.
        A number, or a tensor () of the compute type of `like` if a `count` cannot be read without
        waiting.
        """
        if reduction != "mean":
            return None if reduction == "none" else 1.0
        if count is None:
            return self.ranks / self.rows
        readable = count.device.type == "cpu" and not (traced() or transformed(count))
        if self.group is None and readable:
            return 1 / max(count.item(), 1)
        dtype = compute_dtype(like)
        return self.ranks / self.total(count).clamp(min=1).to(dtype)

    def total_with_gradient(self, value):
        """The sum of a tensor over the ranks, differentiable."""
        return value if self.group is None else sum_with_gradient(value, self.name)

    def total(self, value):
        """The sum of a tensor over the ranks."""
        return value if self.group is None else all_reduce_sum(value, self.name)


def batchwise(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a loss with `group=`, so that an error on one rank is raised on all ranks and a
    learnt number stays the same on all ranks.

    The gradient of a learnt number is averaged over the ranks, as by DistributedDataParallel; if
    that averages it again, the values are already equal. A learnt number may have shape (1,), which
    FSDP2 requires, or be a DTensor; tensors may be DTensors (fastsim/dtensor.py).
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, group: Any = None, **options: Any) -> Any:
        for name in LEARNT:
            if name in options:
                options[name] = learnt_number(options[name])
        dtensors = any_dtensor(args) or any_dtensor(options.values())
        if group is None and not dtensors:
            return function(*args, group=None, **options)
        of_ranks = _uncompiled if torch.compiler.is_compiling() else _of_ranks
        if dtensors:
            options, args = signature.bind(*args, group=group, **options).arguments, ()
            del options["group"]
        return of_ranks(function, args, options, group, dtensors)

    call.__kwdefaults__ = function.__kwdefaults__
    return call


def _of_ranks(function, args, options, group, dtensors):
    if dtensors:
        return _of_dtensors(function, options, group)
    return _together(function, args, options, group)


# Communication cannot be traced, so torch.compile runs this uncompiled, between its graphs. The
# same as torch.compiler.disable, which would import the whole compiler at once.
_uncompiled = torch._disable_dynamo(_of_ranks)


def _together(function, args, options, group, *, averaged=True):
    """Calls the function on all ranks of a group.

    averaged: whether gradients of learnt numbers are averaged over the ranks instead of summed.
    """
    ranks = process_group(group)
    with failures_are_told(ranks):
        for name in LEARNT:
            if name in options:
                options[name] = _shared(options[name], ranks, averaged)
        return function(*args, group=group, **options)


def _of_dtensors(function, arguments, group):
    local, mesh, sharded = local_arguments(arguments)
    if not sharded:
        if group is not None:
            return _together(function, (), local, group)
        return as_dtensor(function(**local, group=None), mesh, False, None, None)
    if group is not None and process_group(group).group_name != mesh.get_group().group_name:
        raise ValueError(
            "group: wanted None, or that of the mesh over which the DTensors are sharded,"
            f" got {group!r}"
        )
    result = _together(function, (), local, group or mesh.get_group(), averaged=False)
    first = next(iter(inspect.signature(function).parameters))
    rows = arguments[first].shape[0]
    return as_dtensor(result, mesh, True, rows, arguments.get("reduction"))


def learnt_number(value):
    """A number as it is, or a tensor of one as a plain 0-d tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.full_tensor() if is_dtensor(value) else value
    return value.reshape(()) if value.shape == (1,) else value


def _shared(number, group, averaged):
    learnt = isinstance(number, torch.Tensor) and number.requires_grad
    if not (learnt and torch.is_grad_enabled()):
        return number
    return _Shared.apply(number, group, dist.get_world_size(group) if averaged else 1)


class _Shared(torch.autograd.Function):
    """The number itself; its gradient is the sum of the ranks' gradients, divided by `share`."""

    @staticmethod
    def forward(ctx, number, group, share):
        ctx.group, ctx.share = group, share
        return number.view_as(number)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce_sum(grad, ctx.group.group_name) / ctx.share, None, None


def join(group, loss, rows, columns, *, length=0, **options):
    """The `Batch` for the arguments of a loss: how many rows and columns each rank has.

    group: a process group, a DeviceMesh of one dimension, `Ring(group)`, or None.
    loss: the name of the loss.
    length: the number of tokens of this rank's longest text, for losses over tokens.

    Raises on every rank: ValueError with the name and both values if ranks call different losses or
    have different options; RankError if another rank has failed.
    """
    if group is None:
        return Batch([rows.shape[0]], [columns.shape[0]], longest=length)
    ring = isinstance(group, Ring)
    if ring and options["backend"] == "eager":
        raise ValueError(
            "group: wanted a process group, as the eager backend holds every score, got a Ring"
        )
    group = process_group(group)
    know(group)
    sides = {"rows": rows, "columns": columns}
    said = {"loss": loss, "exchange": "ring" if ring else "gather", "width": rows.shape[1:]}
    said |= {"dtype": rows.dtype, "gradients enabled": torch.is_grad_enabled()}
    said |= {"metrics": in_metrics()}
    said |= {f"gradient of {side}": tensor.requires_grad for side, tensor in sides.items()}
    said = {name: describe(value) for name, value in (said | options).items()}
    targets = options.get("targets")
    dense = targets.shape[-1] if isinstance(targets, torch.Tensor) else -1
    numbers = [rows.shape[0], columns.shape[0], dense, length]
    table = agree(group, said, numbers)
    row_counts, column_counts, of_targets, lengths = map(list, zip(*table, strict=True))
    for side, counts in (("rows", row_counts), ("columns", column_counts)):
        if not any(counts):
            raise ValueError(f"{side}: wanted at least one over all ranks of the group, got none")
    for rank, count in enumerate(of_targets):
        if count not in (-1, sum(column_counts)):
            raise ValueError(
                f"targets: wanted {sum(column_counts)} columns, those of all ranks,"
                f" got {count} on rank {rank}"
            )
    return Batch(row_counts, column_counts, group, ring, dist.get_rank(group), max(lengths))
