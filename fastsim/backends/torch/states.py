"""The state of the whole matrix from those of its panels, added up in the order of the panels."""

import torch

# Parts of the state of a row: pairs of a maximum and a sum of exponentials at a scale, then sums.
_SCALES = {
    "softmax": ("scale",),
    "multi_similarity": ("scale", "positive_scale"),
    "multi_positive": ("scale",),
    "levels": ("scale",),
}
ROW_PARTS = {
    "softmax": 4,
    "sigmoid": 2,
    "squared_error": 1,
    "multi_similarity": 4,
    "multi_positive": 4,
}


def joined(scale, state, more):
    """Maxima and sums of exponentials relative to them, of both."""
    (top, total), (other_top, other_total) = state, more
    both = torch.maximum(top, other_top)
    grown = other_total * (scale * (other_top - both)).exp()
    return [both, total * (scale * (top - both)).exp() + grown]


class States:
    """Collects the states of panels, band of rows by band of rows.

    sums: the first two parts over all columns, where they are known; the others alone are added.
    """

    def __init__(self, tile, sums=None):
        self.tile, self.sums = tile, sums
        self.bands = []  # (first row, state of the rows)
        self.columns = {}  # first column -> state of the columns
        self.matrix = None

    def add(self, state, block):
        """Adds the state of a block, whose columns follow those of the block before."""
        rows, columns = block
        if self.sums is not None:
            state = state[2:]
        if self.tile.kind == "levels":
            self.matrix = state if self.matrix is None else self._merged(self.matrix, state)
            return
        count = ROW_PARTS[self.tile.kind] - 2 * (self.sums is not None)
        state, of_columns = state[:count], state[count:]
        if self.bands and self.bands[-1][0] == rows.start:
            self.bands[-1] = rows.start, self._merged(self.bands[-1][1], state)
        else:
            self.bands.append((rows.start, state))
        if of_columns:
            before = self.columns.get(columns.start)
            if before is not None:
                of_columns = joined(self.tile.scale, before, of_columns)
            self.columns[columns.start] = of_columns

    def result(self):
        """The parts of the state."""
        if self.tile.kind == "levels":
            return self.matrix
        rows = [band for _, band in self.bands]
        if self.sums is not None:
            return [*self.sums, *_concatenated(rows)]
        return [*_concatenated(rows), *_concatenated(list(self.columns.values()))]

    def _merged(self, state, more):
        scales = () if self.sums is not None else _SCALES.get(self.tile.kind, ())
        parts = []
        for number, scale in enumerate(scales):
            pair = slice(2 * number, 2 * number + 2)
            parts += joined(getattr(self.tile, scale), state[pair], more[pair])
        sums = slice(2 * len(scales), None)
        return [*parts, *(a + b for a, b in zip(state[sums], more[sums], strict=True))]


def _concatenated(states):
    if len(states) <= 1:
        return states[0] if states else []
    return list(map(torch.cat, zip(*states, strict=True)))
