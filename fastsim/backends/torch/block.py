"""A block of the score matrix: which of its pairs take part, and their targets, in torch."""

from functools import cached_property

import torch

from fastsim.kinds.kind import EMPTY

# A pair that takes no part: far below every score, finite so that 0 * s stays 0. A maximum is
# held above it, at LOWEST, so that its exponential is exactly 0 even where nothing takes part.
LEFT_OUT, LOWEST = EMPTY, 0.1 * EMPTY
# By what a score may be above its threshold and count as equal, in spacings of its type: products
# of another shape add up in another order.
SLACK = 8


class Block:
    """The pairs of a slice of rows with a slice of columns, and the panel of their scores.

    `whole`: the block has all columns, so that every positive is inside.
    """

    def __init__(self, pairs, place, panel, whole):
        self.pairs, self.place, self.panel, self.whole = pairs, place, panel, whole
        rows, columns = place
        parts = pairs.block(rows, columns)
        self.positives, *self.ids, row_groups, column_groups, self.dense = parts
        self.groups = row_groups, column_groups
        # Row r of the panel is column r + first of the panel.
        self.first = rows.start + pairs.offset - columns.start

    # ---- positives ----

    @cached_property
    def columns(self):
        """(R, 1) the columns of the positives in the panel, clamped where they are outside."""
        columns = (self.positives - self.place[1].start)[:, None]
        return columns if self.whole else columns.clamp(0, self.panel.shape[1] - 1)

    @cached_property
    def inside(self):
        """(R, 1) bool: whose positive is in the panel; None for all."""
        if self.whole:
            return None
        columns = (self.positives - self.place[1].start)[:, None]
        return (columns >= 0) & (columns < self.panel.shape[1])

    def at_positives(self):
        """(R, 1) the panel's values at the positives, 0 where they are outside."""
        values = self.panel.gather(1, self.columns)
        return values if self.whole else torch.where(self.inside, values, 0.0)

    def add_at_positives(self, values):
        """Adds values (R, 1) to the panel at the positives."""
        if not self.whole:
            values = torch.where(self.inside, values, 0.0)
        self.panel.scatter_add_(1, self.columns, values)

    def set_at_positives(self, matrix, value):
        """Sets a matrix of the panel's shape to a number at the positives."""
        if self.whole:
            matrix.scatter_(1, self.columns, value)
        else:
            held = matrix.gather(1, self.columns)
            matrix.scatter_(1, self.columns, torch.where(self.inside, value, held))

    # ---- pairs that take no part ----

    def leave_out(self, guided=None):
        """Decides which pairs take no part; guided: the panel of the guide's scores, if it has.

        Their scores become LEFT_OUT.
        """
        pairs, panel = self.pairs, self.panel
        rows, columns = panel.shape
        self.diagonal = pairs.skip == "diagonal" and -rows < self.first < columns
        masks = []
        if pairs.skip == "lower" and self.first + rows > 0:
            row = torch.arange(self.first, self.first + rows, device=panel.device)
            masks.append(torch.arange(columns, device=panel.device) <= row[:, None])
        if self.ids[0] is not None:
            same = self.ids[0][:, None] == self.ids[1]
            if self.positives is not None:
                self.set_at_positives(same, False)
            masks.append(same)
        if pairs.thresholds is not None:
            masks.append(panel > self._thresholds())
        if guided is not None:
            above = guided > _above(pairs.guide.thresholds[self.place[0], None])
            if self.positives is not None:
                self.set_at_positives(above, False)
            masks.append(above)
        self.mask = None
        for mask in masks:
            self.mask = mask if self.mask is None else self.mask.logical_or_(mask)
        self.fill(panel, LEFT_OUT)

    def _thresholds(self):
        """(R, 1) the highest score that takes part."""
        # Of this very panel where they can be: a copy of the positive ties with it.
        own = self.panel.gather(1, self.columns) + self.pairs.exclude_above
        thresholds = _above(self.pairs.thresholds[self.place[0], None])
        return own if self.whole else torch.where(self.inside, own, thresholds)

    def fill(self, matrix, value):
        """Sets a matrix of the panel's shape to a number where pairs take no part."""
        if self.diagonal:
            matrix.diagonal(self.first).fill_(value)
        if self.mask is not None:
            matrix.masked_fill_(self.mask, value)

    # ---- targets ----

    @cached_property
    def same(self):
        """(R, C) bool: pairs of one group that take part."""
        same = self.groups[0][:, None] == self.groups[1]
        self.fill(same, False)
        return same

    def targets(self):
        """(R, C) targets in the panel's type, 0 for pairs that take no part; a fresh matrix."""
        if self.dense is not None:
            targets = self.dense.to(self.panel.dtype, copy=True)
        elif self.groups[0] is not None:
            targets = (self.groups[0][:, None] == self.groups[1]).to(self.panel.dtype)
            negative = self.pairs.negative_target
            if negative:
                targets.mul_(1 - negative).add_(negative)
        else:
            targets = torch.zeros_like(self.panel)
            self.set_at_positives(targets, 1.0)
        self.fill(targets, 0)
        return targets


def _above(thresholds):
    """Thresholds that were found by another product."""
    return thresholds + SLACK * torch.finfo(thresholds.dtype).eps
