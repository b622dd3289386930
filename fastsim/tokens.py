"""Sequences of token embeddings as one matrix of rows, for late interaction."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsim.checks import FLOATING, INTEGRAL, check_device, check_tensor, without_values


@dataclass(frozen=True)
class Tokens:
    """Sequences of tokens, whose rows lie one sequence after the other.

    rows: (P, D) token embeddings.
    count: the number of sequences.
    length: the number of rows of each sequence, or None with `offsets`.
    offsets: None, or (count + 1,) int64, the first row of each sequence, then the end of the last.
    mask: (P,) bool, whether a row is a token, not padding; None: every row is a token.
    """

    rows: Tensor
    count: int
    length: int | None
    offsets: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, values, mask, offsets):
        """The `Tokens` of values (count, L, D), or with offsets (P, D); the mask has no D."""
        mask = None if mask is None else mask.reshape(-1)
        if offsets is not None:
            return cls(values, offsets.shape[0] - 1, None, offsets, mask)
        count, length, width = values.shape
        return cls(values.reshape(-1, width), count, length, None, mask)

    def starts(self):
        """(count + 1,) int64: the first row of each sequence, and the end of the last one."""
        if self.offsets is not None:
            return self.offsets
        numbers = torch.arange(self.count + 1, device=self.rows.device)
        return numbers * self.length

    def numbers(self):
        """(P,) int64: the index of the sequence of each row."""
        rows = torch.arange(self.rows.shape[0], device=self.rows.device)
        if self.offsets is None:
            return rows // self.length
        return torch.searchsorted(self.offsets, rows, right=True) - 1

    def sums(self, values):
        """The sums (count, K) of values (P, K) over the rows of each sequence."""
        if self.offsets is None:
            return values.view(self.count, self.length, -1).sum(1)
        return torch.segment_reduce(values, "sum", offsets=self.offsets, axis=0, initial=0.0)

    def cleared(self):
        """The rows with zeros for padding, even if the padding holds NaN or infinity."""
        return self.rows if self.mask is None else torch.where(self.mask[:, None], self.rows, 0.0)

    def kept(self):
        """(count,) int64: the number of tokens of each sequence, without padding."""
        if self.mask is None:
            return self.starts().diff()
        total = torch.nn.functional.pad(self.mask.cumsum(0), (1, 0))
        return total[self.starts()].diff()

    def largest(self, scores):
        """The token of each sequence with the largest score, from scores (Q, P): (Q, count) int64.

        Counted from the first row of the sequence; the first of equals, -1 without a token.
        """
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -torch.inf)
        empty = self.kept() == 0
        if self.offsets is None:
            places = scores.view(-1, self.count, self.length).max(2).indices
            return places.masked_fill(empty, -1)
        rows, columns = scores.shape
        numbers = self.numbers().expand(rows, columns)
        top = scores.new_full((rows, self.count), -torch.inf)
        top = top.scatter_reduce(1, numbers, scores, "amax")
        largest = (scores == top.gather(1, numbers)) | scores.isnan()
        if self.mask is not None:
            largest &= self.mask
        column = torch.arange(columns, device=scores.device).expand(rows, columns)
        column = torch.where(largest, column, columns)
        first = column.new_full((rows, self.count), columns)
        first = first.scatter_reduce(1, numbers, column, "amin")
        return (first - self.offsets[:-1]).masked_fill(empty, -1)


def chosen(scores, places, starts):
    """The scores (Q, K) at the places of `Tokens.largest`, -inf if the place is -1.

    scores: (Q, P). starts: the first column of each sequence, (K,) or (Q, K).
    """
    columns = (starts + places.clamp(min=0)).clamp(max=scores.shape[1] - 1)
    return torch.where(places >= 0, scores.gather(1, columns), -torch.inf)


def check_tokens(name, value, offsets, *, dimensions=3, empty=False):
    """`value` holds token embeddings of `dimensions` dimensions, or (P, D) with offsets.

    empty: as for `check_tensor`.
    """
    shape = {2: "(P, D), as offsets are given", 3: "(B, L, D)", 4: "(B, N, L, D)"}
    dimensions = dimensions if offsets is None else 2
    what = f"floating-point token embeddings {shape[dimensions]}"
    check_tensor(name, value, ndim=dimensions, dtypes=FLOATING, what=what, empty=empty)


def check_mask(name, mask, like_name, like):
    """`mask` is a bool mask of the tokens of `like`, or None."""
    if mask is None:
        return
    empty = like.shape[0] == 0
    what = "a bool tensor"
    check_tensor(name, mask, ndim=like.dim() - 1, dtypes=(torch.bool,), what=what, empty=empty)
    if mask.shape != like.shape[:-1]:
        wanted = tuple(like.shape[:-1])
        raise ValueError(
            f"{name}: wanted shape {wanted}, that of the tokens of {like_name},"
            f" got {tuple(mask.shape)}"
        )
    check_device(name, mask, like_name, like)


def check_some_token(name, mask, numbers=None):
    """Every sequence of the mask (..., L) has a token; numbers: only these sequences are checked.

    Checked at once on a CPU, by an assertion on the device elsewhere.
    """
    if mask is None or without_values(mask):
        return
    some = mask.flatten(0, -2).any(1)
    some = some if numbers is None else some[numbers]
    if mask.device.type != "cpu":
        torch._assert_async(some.all())
    elif not some.all():
        first = int(torch.logical_not(some).nonzero()[0])
        which = first if numbers is None else int(numbers[first])
        raise ValueError(
            f"{name}: wanted at least one token in every document that has to be scored,"
            f" got none in document {which}"
        )


def check_offsets(name, offsets, like_name, like):
    """Checks offsets, integers that rise from 0 to the rows of `like`; returns int64 or None.

    The values are checked at once on a CPU, by an assertion on the device elsewhere.
    """
    if offsets is None:
        return None
    check_tensor(name, offsets, ndim=1, dtypes=INTEGRAL, what="integers")
    check_device(name, offsets, like_name, like)
    if offsets.shape[0] < 2:
        raise ValueError(f"{name}: wanted at least 2 entries, got {offsets.shape[0]}")
    offsets = offsets.to(torch.int64).contiguous()
    rows = like.shape[0]
    right = (offsets[0] == 0) & (offsets[-1] == rows) & (offsets.diff() >= 0).all()
    if without_values(offsets):
        return offsets
    if offsets.device.type != "cpu":
        torch._assert_async(right)
    elif not right:
        raise ValueError(
            f"{name}: wanted numbers that rise from 0 to {rows}, the rows of {like_name},"
            f" got {offsets.tolist()[:8]}{'...' if len(offsets) > 8 else ''}"
        )
    return offsets
