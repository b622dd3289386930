"""Selection over all pairs in plain torch: the closest and the hardest columns, the top k."""

import torch

from fastsim.backends import lists
from fastsim.backends.torch.block import LEFT_OUT, LOWEST
from fastsim.backends.torch.panels import Workspace
from fastsim.backends.torch.row_metrics import add_row_metrics
from fastsim.ties import highest_equal


class Best:
    """The running maximum of each row and its column: the first among equals, -1 for none."""

    def __init__(self, like):
        self.like, self.values, self.columns = like, None, None

    def add(self, scores, first):
        """Adds a panel (R, C) of scores whose columns begin at `first`."""
        values, columns = scores.max(1)
        # NaN <= LOWEST is false, so that a NaN keeps its column.
        columns = torch.where(values <= LOWEST, -1, columns + first)
        if self.values is None:
            self.values, self.columns = values, columns
            return
        better = values > self.values
        self.values = torch.where(better, values, self.values)
        self.columns = torch.where(better, columns, self.columns)


def closest(backend, pairs, semi_hard, unit_x, unit_y, ceilings, row_metrics):
    """`Backend.closest`."""
    rows, columns = unit_x.shape[0], unit_y.shape[0]
    whole = backend.whole_rows_fit(columns, unit_x.device)
    if semi_hard and ceilings is None and not whole:
        ceilings = backend.positive_scores(pairs, unit_x, unit_y)
    if ceilings is not None:
        ceilings = highest_equal(ceilings)
    bands, best, workspace = [], None, Workspace()
    for place in backend.blocks(rows, columns, unit_x.device):
        block = backend.block(pairs, unit_x, unit_y, place, workspace)
        if row_metrics is not None:
            add_row_metrics(block, row_metrics[place[0]])
        if semi_hard:
            from_block = ceilings is None
            limit = highest_equal(block.at_positives()) if from_block else ceilings[place[0], None]
            block.panel.masked_fill_(block.panel > limit, LEFT_OUT)
        block.leave_out()
        block.set_at_positives(block.panel, LEFT_OUT)
        if place[1].start == 0:
            best = Best(block.panel)
            bands.append(best)
        best.add(block.panel, place[1].start)
    return torch.cat([band.columns for band in bands])


def hardest(backend, pairs, offsets, x, y):
    """`Backend.hardest`."""
    bands, best, workspace = [], None, Workspace()
    for place in backend.blocks(x.shape[0], y.shape[0], x.device):
        block = backend.block(pairs, x, y, place, workspace)
        panel = block.panel
        if offsets is not None:
            panel.sub_(offsets[place[1]])
        block.leave_out()
        if place[1].start == 0:
            best = Best(panel), Best(panel)
            bands.append(best)
        same = block.same
        positives = panel.neg().masked_fill_(~same, LEFT_OUT)
        best[0].add(positives, place[1].start)
        best[1].add(panel.masked_fill_(same, LEFT_OUT), place[1].start)
    lowest, highest = zip(*bands, strict=True)
    return tuple(torch.cat([band.columns for band in side]) for side in (lowest, highest))


def top_k(backend, queries, corpus, k):
    """`Backend.top_k`."""
    if queries.dtype != torch.float64:
        return lists.top_k(backend, queries, corpus, k)
    unit_x, unit_y = backend.unit_rows(queries)[0], backend.unit_rows(corpus)[0]
    rows, columns = unit_x.shape[0], unit_y.shape[0]
    values = unit_x.new_empty(rows, k)
    indices = torch.empty(rows, k, dtype=torch.int64, device=unit_x.device)
    best, workspace = None, Workspace()
    for place in backend.blocks(rows, columns, unit_x.device):
        scores = backend.scores(unit_x, unit_y, place, workspace)
        index = torch.arange(place[1].start, place[1].stop, device=scores.device)
        index = index.expand(scores.shape)
        if place[1].start > 0:
            scores, index = torch.cat([best[0], scores], 1), torch.cat([best[1], index], 1)
        ordered, order = scores.sort(dim=1, descending=True, stable=True)
        best = ordered[:, :k].clone(), index.gather(1, order[:, :k])
        if place[1].stop == columns:
            values[place[0]], indices[place[0]] = best
    return values, indices
