"""A block of the score matrix in torch: its scores, targets, and pairs that are left out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsim.kinds.kind import EMPTY
from fastsim.ties import highest_equal, size_of_rows

# The score of a pair that is left out: far below every score, but finite, so that 0 * s stays 0.
# Maxima are at least LOWEST, so that its exponential is exactly 0 even if all pairs are left out.
LEFT_OUT, LOWEST = EMPTY, 0.1 * EMPTY


@dataclass
class Block:
    """The pairs of R rows with C columns, and their scores.

    panel: (R, C) the scores.
    positives: (R,) the column of each row's positive in the panel; it may lie outside.
    row_ids, column_ids, row_groups, column_groups, dense, thresholds: (R,), (C,), (R, C) and (R,)
        as in `fastsim.pairs.Pairs`.
    guided, guide_thresholds: (R, C) the scores of the guide, (R,) the thresholds for them.
    bias: (C,) added to the scores of pairs that are not left out, or None.
    first: row r of the panel meets the diagonal of the matrix in column r + first of the panel.
    whole: whether the block has all columns; then every positive is inside.
    positive_weights: (R,) as in `fastsim.tile_loss.TileLoss`, or None.
    """

    panel: Tensor
    positives: Tensor | None
    row_ids: Tensor | None
    column_ids: Tensor | None
    row_groups: Tensor | None
    column_groups: Tensor | None
    dense: Tensor | None
    thresholds: Tensor | None
    guided: Tensor | None
    guide_thresholds: Tensor | None
    bias: Tensor | None
    first: int
    whole: bool
    skip: str
    exclude_above: float | None
    negative_target: float
    positive_weights: Tensor | None = None
    _same: Tensor | None = None

    @classmethod
    def of(cls, pairs, place, panel, columns, guided=None, bias=None):
        """The block of two slices `place` of a matrix with this many columns."""
        rows, across = place
        positives, *others = pairs.block(rows, across)
        guide_thresholds = None if guided is None else pairs.guide.thresholds[rows]
        return cls(
            panel,
            None if positives is None else positives - across.start,
            *others,
            None if pairs.thresholds is None else pairs.thresholds[rows],
            guided,
            guide_thresholds,
            bias,
            first=rows.start + pairs.offset - across.start,
            whole=across == slice(0, columns) and not pairs.sliced,
            skip=pairs.skip,
            exclude_above=pairs.exclude_above,
            negative_target=pairs.negative_target,
        )

    @property
    def one_positive(self):
        """As `Pairs.one_positive`."""
        return self.positives is not None and self.row_groups is None and self.dense is None

    @property
    def untargeted(self):
        """As `Pairs.untargeted`."""
        return self.positives is None and self.row_groups is None and self.dense is None

    # ---- positives ----

    @property
    def columns(self):
        """(R, 1) the columns of the positives, clamped to the panel."""
        columns = self.positives[:, None]
        return columns if self.whole else columns.clamp(0, self.panel.shape[1] - 1)

    @property
    def inside(self):
        """(R, 1) bool: whether the row's positive is in the panel; None if all are."""
        if self.whole:
            return None
        columns = self.positives[:, None]
        return (columns >= 0) & (columns < self.panel.shape[1])

    def at_positives(self):
        """(R, 1) the panel's values at the positives, 0 if they are outside."""
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

    # ---- pairs that are left out ----

    def leave_out(self):
        """Finds the pairs that are left out and sets their scores to LEFT_OUT."""
        self.mask = None
        for mask in self._masks():
            self.mask = mask if self.mask is None else self.mask.logical_or_(mask)
        self.fill(self.panel, LEFT_OUT)

    def _masks(self):
        """(R, C) bool matrices of the pairs that are left out, without those of the diagonal."""
        panel = self.panel
        masks = self._masks_by_index()
        if self.row_ids is not None:
            same = self.row_ids[:, None] == self.column_ids
            if self.positives is not None:
                self.set_at_positives(same, False)
            masks.append(same)
        if self.thresholds is not None:
            masks.append(panel > self._thresholds())
        if self.guided is not None:
            above = self.guided > highest_equal(self.guide_thresholds[:, None])
            if self.positives is not None:
                self.set_at_positives(above, False)
            masks.append(above)
        return masks

    def _masks_by_index(self):
        rows, columns = self.panel.shape
        self.diagonal = self.skip == "diagonal" and -rows < self.first < columns
        if self.skip != "lower" or self.first + rows <= 0:
            return []
        row = torch.arange(self.first, self.first + rows, device=self.panel.device)
        return [torch.arange(columns, device=self.panel.device) <= row[:, None]]

    def _thresholds(self):
        """(R, 1) the highest score that is not left out."""
        # From this panel if the positive is in it, so that a copy of the positive ties with it.
        size = size_of_rows(self.panel)
        from_panel = highest_equal(self.panel.gather(1, self.columns) + self.exclude_above, size)
        if self.whole:
            return from_panel
        otherwise = highest_equal(self.thresholds[:, None], size)
        return torch.where(self.inside, from_panel, otherwise)

    def fill(self, matrix, value):
        """Sets a matrix of the panel's shape to a number at the pairs that are left out."""
        if self.diagonal:
            matrix.diagonal(self.first).fill_(value)
        if self.mask is not None:
            matrix.masked_fill_(self.mask, value)

    # ---- targets ----

    @property
    def same(self):
        """(R, C) bool: pairs of one group that are not left out."""
        if self._same is None:
            self._same = self.row_groups[:, None] == self.column_groups
            self.fill(self._same, False)
        return self._same

    def targets(self):
        """(R, C) targets in the panel's type, 0 for pairs left out; always a new matrix."""
        if self.dense is not None:
            targets = self.dense.to(self.panel.dtype, copy=True)
        elif self.row_groups is not None:
            targets = (self.row_groups[:, None] == self.column_groups).to(self.panel.dtype)
            negative = self.negative_target
            if negative:
                targets.mul_(1 - negative).add_(negative)
        else:
            targets = torch.zeros_like(self.panel)
            self.set_at_positives(targets, 1.0)
        self.fill(targets, 0)
        return targets


class FusibleBlock(Block):
    """A block that compares the index of each pair, which a compiler fuses with what follows.

    It does not look at sizes, so that one compilation serves all of them.
    """

    @property
    def _column(self):
        return torch.arange(self.panel.shape[1], device=self.panel.device)

    def add_at_positives(self, values):
        self.panel += torch.where(self._column == self.positives[:, None], values, 0.0)

    def set_at_positives(self, matrix, value):
        matrix.masked_fill_(self._column == self.positives[:, None], value)

    def _masks_by_index(self):
        self.diagonal = False
        if self.skip == "nothing":
            return []
        row = torch.arange(self.panel.shape[0], device=self.panel.device)[:, None] + self.first
        return [self._column == row if self.skip == "diagonal" else self._column <= row]
