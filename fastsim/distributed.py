"""One batch over several processes: `group=` of the batch-wise losses.

Every rank of a torch.distributed process group gives its own rows and columns (anchors and
candidates), as many as it has. Rows stay where they are; columns and ids are gathered, with a
gradient: all_gather forward, reduce_scatter backward. What a loss keeps per column or for the
whole matrix (symmetric `info_nce`, `cosent_matrix`) is merged over the ranks; `cosent` and `angle`
gather only their scores. `positives` counts within the rank's own candidates; a target matrix
holds the rank's own rows against the columns of all ranks, rank after rank. `references` of a loss
by groups are columns too: each rank gives its own, with `own_first` beginning with its own
embeddings, and its rows are compared with those of all ranks. A row that two ranks give counts
twice.

Under torch.compile a loss with `group=` runs uncompiled, between the graphs around it.

A rank may have no rows, as at the end of an epoch. An error on one rank is raised on all of them
(fastsim/agreement.py), so that nobody waits.

Under DistributedDataParallel, which averages gradients, nothing else is to be done: reduction
"mean" weighs a row by R / N, for R ranks and the N rows of all of them (or whatever else the loss
takes its mean over). So the average over the ranks is the mean over the whole batch, also where
ranks have unequal numbers of rows. With "sum" the ranks' values add up to the sum over the whole
batch. Losses over all pairs of pairs have one value, the same on every rank.

`Ring(group)` in place of the group: the columns travel from rank to rank instead. For M columns
of width D on R ranks, a gathering rank holds M D embeddings, their unit rows and two gradients of
that size; a rank of a ring holds a few blocks of M D / R, but computes the scores twice and
passes the columns on twice. It is for columns that do not fit when gathered.

DTensors that are sharded by rows are such parts too, over the group of their mesh; a replicated
one counts as the tensor that it holds (fastsim/dtensor.py). The loss is a DTensor then, and its
gradients are those of one process; nothing is left to be averaged.

`fastsim.grad_cache` is the other half of a very large batch: its encoder in micro-batches.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fastsim.agreement import agree, describe, exchange, failures_are_told
from fastsim.batch_metrics import watched
from fastsim.collectives import all_reduce_sum, gather, gather_values, know, sum_with_gradient
from fastsim.dtensor import any_dtensor, as_dtensor, is_dtensor, local_arguments
from fastsim.groups import Ring, process_group
from fastsim.operators import once_differentiable, traced, transformed
from fastsim.reduce import reduce

__all__ = ["Ring"]

P = ParamSpec("P")
R = TypeVar("R")

# Options that may want a gradient, in the order in which every rank averages them.
LEARNT = ("temperature", "scale", "bias", "margin")


@dataclass
class Batch:
    """Where this process's part lies in the whole batch. With one process the part is the whole.

    row_counts, column_counts: the numbers of rows and of columns of each rank. longest: the number
    of tokens of the longest text of any rank.
    """

    row_counts: list
    column_counts: list
    group: object = None
    ring: bool = False
    rank: int = 0
    longest: int = 0

    @property
    def ranks(self):
        """Number of processes."""
        return len(self.row_counts)

    @property
    def rows(self):
        """Rows of all ranks."""
        return sum(self.row_counts)

    @property
    def columns(self):
        """Columns of all ranks."""
        return sum(self.column_counts)

    @property
    def own_rows(self):
        """This rank's rows among all."""
        first = sum(self.row_counts[: self.rank])
        return slice(first, first + self.row_counts[self.rank])

    @property
    def first_column(self):
        """This rank's first column among all."""
        return sum(self.column_counts[: self.rank])

    @property
    def name(self):
        """The group's name, for registered operators; "" alone."""
        return "" if self.group is None else self.group.group_name

    @property
    def mean_share(self):
        """The weight of a mean over this rank's rows in the average over the ranks."""
        return self.ranks * self.row_counts[self.rank] / self.rows

    def refuse_ring(self, reason):
        """ValueError for a `Ring`; reason: why columns cannot travel, a clause after "as"."""
        if self.ring:
            raise ValueError(f"group: wanted a process group, as {reason}, got a Ring")

    def gather_rows(self, part):
        """(N, ...) of all ranks from this rank's, with a gradient; None stays None."""
        return part if self.group is None else gather(part, self.row_counts, self.group)

    def gather_columns(self, part):
        """(M, ...) of all ranks from this rank's, with a gradient; None stays None."""
        return part if self.group is None else gather(part, self.column_counts, self.group)

    def gather_both(self, rows, columns):
        """Rows and columns of all ranks; the same tensor where they are the same."""
        gathered = self.gather_rows(rows)
        return gathered, gathered if columns is rows else self.gather_columns(columns)

    def gather_values(self, part):
        """The values (K,) of all ranks, any number of each."""
        if self.group is None:
            return part
        counts = [row[0] for row in exchange(self.group, [part.shape[0]])]
        return gather_values(part, counts, self.group)

    def reduce(self, losses, reduction, count=None):
        """This rank's share of the reduction from the losses of its rows, or of all rows.

        count: an integer tensor (), of this rank, how many the mean is over; None: its rows.
        """
        if self.group is None:
            return reduce(losses, reduction, count)
        if losses.shape[0] == self.rows:
            losses = losses[self.own_rows]
        if reduction == "none":
            return losses
        return (losses * self.row_weights(reduction, losses, count)).sum()

    def row_weights(self, reduction, like, count=None):
        """The weights that make sum_i weights_i loss_i the reduction; None for "none".

        A number for all rows; with a `count` () that cannot be read at once a tensor () of the
        compute type of the rows `like`. count: as in `reduce`.
        """
        if reduction != "mean":
            return None if reduction == "none" else 1.0
        if count is None:
            return self.ranks / self.rows
        readable = count.device.type == "cpu" and not (traced() or transformed(count))
        if self.group is None and readable:
            return 1 / max(count.item(), 1)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return self.ranks / self.total(count).clamp(min=1).to(dtype)

    def total_with_gradient(self, value):
        """The sum of a tensor over the ranks, differentiable."""
        return value if self.group is None else sum_with_gradient(value, self.name)

    def total(self, value):
        """The sum of a tensor over the ranks."""
        return value if self.group is None else all_reduce_sum(value, self.name)


def batchwise(function: Callable[P, R]) -> Callable[P, R]:
    """A loss with `group=`: an error on one rank is raised on all, a learnt number stays the same.

    The gradient of a learnt number is its mean over the ranks, as DistributedDataParallel makes it;
    where that averages too, it averages what is equal by then. A learnt number may have shape (1,),
    as FSDP2 wants it, or be a DTensor; tensors may be DTensors (fastsim/dtensor.py).
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, group: Any = None, **options: Any) -> Any:
        for name in LEARNT:
            if isinstance(value := options.get(name), torch.Tensor):
                options[name] = learnt_number(value)
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


# What ranks say to each other is nothing to trace: torch.compile runs it as it is, between graphs.
# The same as torch.compiler.disable, which would import the whole compiler at once.
_uncompiled = torch._disable_dynamo(_of_ranks)


def _together(function, args, options, group, *, averaged=True):
    """The function on all ranks of a group; averaged: whether learnt gradients are, else summed."""
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
    """A learnt number as a plain 0-d tensor."""
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
    """The `Batch` of a loss's arguments: how many rows and columns each rank of the group has.

    length: of this rank's longest text of tokens, where there are some.
    group: a process group, a DeviceMesh of one dimension, `Ring(group)`, or None. ValueError on
    every rank, with the name and both values, where ranks call different losses or have different
    options; RankError where another rank has failed.
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
    said |= {"metrics": watched()}
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
