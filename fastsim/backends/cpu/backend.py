"""The compiled CPU backend: panels of scores that stay in cache, our products and epilogues."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from fastsim.backends.base import Backend
from fastsim.backends.cpu import amx, max_sim
from fastsim.backends.cpu.mirrored import Mirrored, mirrors
from fastsim.backends.cpu.passes import forward_of, pair_arguments, served, write_score_grad
from fastsim.backends.cpu.sweep import SWEPT, CpuSweep
from fastsim.backends.cpu.workspace import Workspace
from fastsim.backends.extras import EXTRAS
from fastsim.backends.panel import blocks_within, panel_bytes
from fastsim.batch_metrics import SEEN
from fastsim.kinds import LATE_INTERACTION, SELECTIONS
from fastsim.kinds.kind import EMPTY
from fastsim.pairs import Pairs

LIBRARY = Path(__file__).parents[2] / "_lib" / "cpu.so"

PANEL = 4 << 20  # scores: 16 MB in float32, which a last-level cache holds
# Scores that a forward reduction leaves for the score gradients: 32 MB in float32. To read them
# back is cheaper than the product of even a narrow embedding whether a cache holds them or not, so
# it is memory that bounds them: no more than other losses take at 16,384 x 384, where gradients
# outweigh panels.
KEPT = 8 << 20
WORTH_KEEPING = 16  # to keep less than one row in so many saves less than 2 % of the products
FEWEST_ROWS, MOST_ROWS = 120, 1008  # fewer starve the products, more gain nothing
ONCE = 4  # by which a panel is smaller whose scores are looked at once and multiply nothing
SWEEP = 4  # by which each panel of a sweep over prefixes, one a width, is smaller
TILE_ROWS = 12  # rows of a panel are a multiple: whole register tiles for two threads
ALIGNED = 64  # a block's first column is a multiple of every kernel's column panel
WIDEST = 1 << 17  # columns of a block: 120 rows of them take 63 MB
WHOLE = (
    "softmax",
    "sigmoid",
    "squared_error",
    "multi_similarity",
    "multi_positive",
    "circle",
    "decoupled",
    "debiased",
    "distillation",
    "hard_triplet",
    "semi-hard_triplet",
)
SMALL = 1 << 27  # multiply-adds of a product up to which one call is faster than a matrix unit
CHEAP = 1 << 24  # multiply-adds of a product that cost less than the calls it saves


def _load():
    """None once the library is loaded, else why it cannot be."""
    if not LIBRARY.exists():
        return (
            "the C++ extension was not built; install a C++ compiler and reinstall fastsim"
            " with FASTSIM_BUILD=cpu"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the C++ extension does not load: {error}"
    return None if _agrees() else "the C++ extension is of other sources; reinstall fastsim"


def _agrees():
    """Whether the library has the constants that this backend counts on."""
    library = torch.ops.fastsim_cpu
    if not hasattr(library, "observed"):
        return False
    packed = [library.panel_columns(single) for single in (True, False)]
    return (
        library.left_out() == EMPTY
        and library.observed() == len(SEEN)
        and TILE_ROWS % library.tile_rows() == 0
        and not any(ALIGNED % columns for columns in packed)
    )


def _most_levels():
    """As the library was built. Read once: torch.compile traces no operator without a tensor."""
    return Backend.most_levels if _UNAVAILABLE else torch.ops.fastsim_cpu.most_levels()


_UNAVAILABLE = _load()
_whole = None if _UNAVAILABLE else torch.ops.fastsim_cpu.whole.default
_KINDS = {*served(), *SELECTIONS, *LATE_INTERACTION}


def _with_positives(columns, first):
    return torch.stack([torch.arange(first, first + len(columns)), columns])


def _block_shape(rows, columns, whole_rows, panels=1):
    if 0 in (rows, columns):  # one rank of a group may have none
        return TILE_ROWS, ALIGNED
    wide = columns if whole_rows else min(columns, WIDEST)
    tall = panel_bytes(4 * PANEL) // 4 // panels // wide // TILE_ROWS * TILE_ROWS
    tall = min(MOST_ROWS, max(FEWEST_ROWS, tall))
    # Blocks of one height: a last one of few rows would starve its products.
    even = -(-rows // -(-rows // tall))
    return min(rows, -(-even // TILE_ROWS) * TILE_ROWS), wide


def _is_one_block(rows, columns):
    fits = rows <= FEWEST_ROWS or rows <= _block_shape(rows, columns, True)[0]
    return fits and columns <= WIDEST


class CpuBackend(Backend):
    """Float32 and float64 panels; 16-bit inputs are normalised into float32."""

    name = "cpu"
    most_dense = 1 << 16
    extras = frozenset(EXTRAS)
    keeps_scores = True
    observes = True

    def unsupported_reason(self, *tensors, kind=None):
        for tensor in tensors:
            if tensor.device.type != "cpu":
                return f"it serves CPU tensors, got one on {tensor.device}"
        return _UNAVAILABLE or self.unsupported_kind(kind)

    def kinds(self):
        return _KINDS

    def note(self):
        products = f", products on {amx.name()}" if amx.name() else ""
        return f", {torch.ops.fastsim_cpu.instruction_set()} kernels{products}"

    def number(self, scalar):
        return scalar.item()

    most_levels = _most_levels()

    def unit_rows(self, x, dtype=None):
        dtype = dtype or torch.promote_types(x.dtype, torch.float32)
        unit = torch.empty(x.shape, dtype=dtype)
        inverse = torch.empty(x.shape[0], dtype=dtype)
        torch.ops.fastsim_cpu.unit_rows(x, unit, inverse)
        return unit, inverse

    def tile_rows(self, x):
        return amx.Rows.of(x) if amx.parts(x.dtype) else self.unit_rows(x)

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        grad = torch.empty(x.shape, dtype=dtype)
        dots = torch.empty_like(inverse)
        torch.ops.fastsim_cpu.unit_rows_backward(grad_unit, x, inverse, factor.item(), grad, dots)
        return grad, dots

    def paired_cosines(self, x, y):
        dtype = torch.promote_types(x.dtype, torch.float32)
        cosines = torch.empty(x.shape[0], dtype=dtype)
        inverse = torch.empty(2, x.shape[0], dtype=dtype)
        torch.ops.fastsim_cpu.paired_cosines(x, y, cosines, inverse)
        return cosines, inverse

    def paired_cosines_backward(self, grad, x, y, cosines, inverse, wants):
        grads = [
            torch.empty(t.shape if wanted else 0, dtype=t.dtype)
            for t, wanted in zip((x, y), wants, strict=True)
        ]
        torch.ops.fastsim_cpu.paired_cosines_backward(
            grad,
            x,
            y,
            cosines,
            inverse,
            *(g if wanted else None for g, wanted in zip(grads, wants, strict=True)),
        )
        return tuple(grads)

    def serves_whole(self, tile, rows, columns, width):
        pairs = tile.pairs
        if tile.kind not in WHOLE or tile.hardness:
            return False
        if pairs.untargeted or pairs.offset or pairs.sliced:
            return False
        if pairs.guide is not None and pairs.guide.scores is None:
            return False
        work = rows * columns * width
        # Without the calls it saves, a triplet loss needs no product but the scores; and panels go
        # through the matrix unit, which outweighs their calls.
        if work > CHEAP and (tile.kind.endswith("triplet") or (work > SMALL and amx.name())):
            return False
        return _is_one_block(rows, columns)

    def whole(self, tile, x, y, scale, bias, weights, wants):
        want_x, want_y = wants or (False, False)
        pairs = tile.pairs
        guide, factors, above = pairs.guide, pairs.factors, pairs.exclude_above
        alike = not isinstance(weights, torch.Tensor)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        loss = torch.empty((), dtype=dtype)
        grad_x = torch.empty(x.shape if want_x else 0, dtype=dtype) if wants else None
        grad_y = torch.empty(y.shape if want_y else 0, dtype=dtype) if wants else None
        parameters = torch.empty(2, dtype=torch.float64) if wants else None
        _whole(
            x,
            y,
            pairs.positives,
            pairs.row_ids,
            pairs.column_ids,
            pairs.row_groups,
            pairs.column_groups,
            pairs.dense,
            pairs.negative_target,
            pairs.skip,
            tile.kind,
            scale,
            bias,
            tile.margin,
            tile.positive_scale,
            tile.base,
            tile.normalise,
            tile.symmetric,
            tile.cosine,
            math.inf if above is None else above,
            None if guide is None else guide.scores,
            None if guide is None else guide.thresholds,
            pairs.column_bias,
            pairs.row_shift,
            *((None, None) if factors is None else factors),
            tile.prior,
            tile.positive_weights,
            None if alike else weights,
            weights if alike else 0.0,
            grad_x if want_x else None,
            grad_y if want_y else None,
            loss,
            parameters,
            tile.seen,
        )
        return (loss, grad_x, grad_y, parameters) if wants else (loss,)

    def sweeps(self, tile, dtype, device):
        return tile.kind in SWEPT

    def prefix_rows(self, x, norms, inverse):
        if amx.parts(x.dtype):
            return amx.Rows.of_norms(x, norms)
        return super().prefix_rows(x, norms, inverse)

    def sweep(self, tile, x, y, *, whole_rows):
        shape = _block_shape(len(x), len(y), whole_rows, panels=SWEEP)
        return CpuSweep(tile, x, y, shape)

    def mirrored(self, tile, unit, *, keep=False):
        if not mirrors(tile, unit):
            return None
        return Mirrored(self, tile, unit, panel_bytes(4 * PANEL) // 4, KEPT if keep else 0)

    def whole_rows_fit(self, columns, device):
        return columns <= WIDEST

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        shape = _block_shape(rows, columns, whole_rows)
        return blocks_within(rows, columns, *shape, lower=lower, aligned=ALIGNED)

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        tall, wide = _block_shape(rows, columns, whole_rows)
        # Whole blocks of whole rows.
        kept = KEPT // wide if keep and wide == columns else 0
        kept = kept if kept * WORTH_KEEPING >= rows else 0
        return Workspace(unit_y, tall, wide, rows if kept >= rows else kept // tall * tall)

    def _seen_once(self, unit_x, unit_y):
        """(blocks, workspace) of a pass that looks at each score once and leaves nothing of it."""
        panels = 1 if amx.parts(unit_y.dtype) else ONCE
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        shape = _block_shape(rows, columns, False, panels)
        return blocks_within(rows, columns, *shape), Workspace(unit_y, *shape)

    def scores(self, unit_x, unit_y, block, workspace, tile=None):
        """The score panel of a block, in the workspace.

        tile: whose pairs' thresholds, guide, bias of columns and shift of rows are applied to it;
        pairs that they decide against get a score below all others. What it asks to be seen is,
        without bias and shift.
        """
        rows, columns = block
        pairs = None if tile is None else tile.pairs
        panel = workspace.panel(block)
        workspace.fill(panel, unit_x[rows], columns.start)
        if pairs is not None and pairs.thresholds is not None:
            torch.ops.fastsim_cpu.leave_out_above(panel, panel, pairs.thresholds[rows])
        if pairs is not None and pairs.guide is not None:
            guide = pairs.guide
            guided = self.scores(guide.rows, guide.columns, block, workspace.beside(guide))
            positives = None if pairs.positives is None else _Positives(pairs, block, panel)
            torch.ops.fastsim_cpu.leave_out_above(panel, guided, guide.thresholds[rows])
            if positives is not None:
                positives.restore(panel)
        if pairs is not None and tile.seen is not None:
            torch.ops.fastsim_cpu.observe(panel, *pair_arguments(pairs, block), tile.seen[rows])
        if pairs is not None and pairs.column_bias is not None:
            panel.add_(pairs.score_bias(columns, tile.scale))
        if pairs is not None and pairs.row_shift is not None:
            panel.sub_(pairs.row_shift[rows, None])
        return panel

    def observe(self, cosines, pairs, seen):
        block = slice(0, cosines.shape[0]), slice(0, cosines.shape[1])
        torch.ops.fastsim_cpu.observe(cosines.detach(), *pair_arguments(pairs, block), seen)

    def cosines(self, x, y):
        # Of few scores, packing for a matrix unit takes longer than their product.
        dtype = torch.promote_types(x.dtype, torch.float32)
        scores = torch.empty(x.shape[0], y.shape[0], dtype=dtype)
        torch.ops.fastsim_cpu.cosines(x, y, scores)
        return scores

    def cosines_backward(self, grad, x, y, wants):
        grads = [
            torch.empty(side.shape, dtype=grad.dtype) if want else None
            for side, want in zip((x, y), wants, strict=True)
        ]
        torch.ops.fastsim_cpu.cosines_backward(grad.contiguous(), x, y, *grads)
        return grads

    def paired_scores(self, unit_x, unit_y):
        parts, rows = [], unit_x.shape[0]
        for first in range(0, rows, FEWEST_ROWS):
            part = slice(first, min(rows, first + FEWEST_ROWS))
            x, y = unit_x[part], unit_y[part]
            square = slice(0, part.stop - first), slice(0, part.stop - first)
            parts.append(self.scores(x, y, square, self.workspace(x, y)).diagonal().clone())
        return torch.cat(parts)

    def multiply(self, left, right, out, *, accumulate):
        transposed = left.stride(1) != 1
        panel = left.t() if transposed else left
        if amx.parts(right.dtype):
            amx.multiply(panel, right, out, transposed, accumulate)
        else:
            torch.ops.fastsim_cpu.multiply(panel, right, out, transposed, accumulate)

    def _pairs(self, pairs, block, workspace):
        """`pair_arguments` with the targets of a block, where they are a product."""
        factors, targets = pairs.factors, None
        if factors is not None:
            beside = workspace.beside(factors)
            targets = self.scores(factors.rows, factors.columns, block, beside)
        return pair_arguments(pairs, block, targets)

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        state = forward_of(tile, rows, columns)
        if sums is not None:
            state.know(sums)
        whole, lower = tile.whole_rows, tile.pairs.each_once
        workspace = workspace or self.workspace(unit_x, unit_y, whole_rows=whole)
        # The first blocks come last: the score gradients begin with what was kept of them.
        blocks = self.blocks(rows, columns, unit_x.device, whole_rows=whole, lower=lower)
        for block in reversed(list(blocks)):
            panel = self.scores(unit_x, unit_y, block, workspace, tile)
            state.add(panel, self._pairs(tile.pairs, block, workspace), block)
            workspace.keep(block, panel)
        return state.result()

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        panel = self.scores(unit_x, unit_y, block, workspace, tile)
        state = forward_of(tile.of_rows(block[0]), *panel.shape)
        pairs = self._pairs(tile.pairs, block, workspace)
        state.fused_pass(panel, pairs, weights[block[0]])
        return state.result(), panel

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        panel = workspace.kept(block)
        if panel is None:
            panel = self.scores(unit_x, unit_y, block, workspace, tile)
        else:
            tile = replace(
                tile, margin=0.0
            )  # the forward reduction has taken it from the positives
        pairs = self._pairs(tile.pairs, block, workspace)
        write_score_grad(tile, panel, pairs, block, coefficients)
        return panel

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, seen=None):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        # Only rows whose positive lies in another block read their ceiling from here.
        if ceilings is None:
            ceilings = torch.zeros(rows, dtype=unit_x.dtype)
            if semi_hard and columns > WIDEST:
                ceilings = torch.linalg.vecdot(unit_x, unit_y[pairs.positives])
        values = torch.full((rows,), EMPTY, dtype=unit_x.dtype)
        indices = torch.full((rows,), -1)
        blocks, workspace = self._seen_once(unit_x, unit_y)
        for block in blocks:
            part = block[0]
            panel, arguments = (
                self.scores(unit_x, unit_y, block, workspace),
                pair_arguments(pairs, block),
            )
            if seen is not None:
                torch.ops.fastsim_cpu.observe(panel, *arguments, seen[part])
            torch.ops.fastsim_cpu.closest(
                panel,
                *arguments,
                semi_hard,
                ceilings[part],
                values[part],
                indices[part],
            )
        return indices

    def hardest(self, pairs, offsets, x, y):
        rows = x.shape[0]
        low, high = x.new_full((rows,), -EMPTY), x.new_full((rows,), EMPTY)
        lowest, highest = torch.full((rows,), -1), torch.full((rows,), -1)
        blocks, workspace = self._seen_once(x, y)
        for block in blocks:
            part, columns = block
            torch.ops.fastsim_cpu.hardest(
                self.scores(x, y, block, workspace),
                *pair_arguments(pairs, block),
                None if offsets is None else offsets[columns],
                low[part],
                lowest[part],
                high[part],
                highest[part],
            )
        return lowest, highest

    def serves_hardest_pairs(self, rows, width):
        return rows * rows * width <= CHEAP and _is_one_block(rows, rows)

    def hardest_pairs(self, x, groups):
        x, count = x.contiguous(), x.shape[0]
        columns, largest = torch.empty(2, count, dtype=torch.int64), x.new_empty(())
        distances = x.new_empty(2, count)
        torch.ops.fastsim_cpu.hardest_pairs(x, groups, columns, distances, largest)
        return columns, distances, largest

    def triplet_distances(self, anchors, positives, negatives):
        dtype = torch.promote_types(anchors.dtype, torch.float32)
        near, far = (torch.empty(anchors.shape[0], dtype=dtype) for _ in range(2))
        torch.ops.fastsim_cpu.triplet_distances(anchors, positives, negatives, near, far)
        return near, far

    def triplet_distances_backward(self, grad, anchors, positives, negatives, near, far, wants):
        sides = anchors, positives, negatives
        grads = [
            torch.empty(side.shape, dtype=side.dtype) if want else None
            for side, want in zip(sides, wants, strict=True)
        ]
        torch.ops.fastsim_cpu.triplet_distances_backward(
            grad.contiguous(), *sides, near, far, *grads
        )
        return grads

    def centred(self, x, y):
        x, y = x.contiguous(), None if y is None else y.contiguous()
        rows, columns = torch.empty_like(x), None if y is None else torch.empty_like(y)
        offsets, largest = x.new_empty(len(x if y is None else y)), x.new_empty(())
        torch.ops.fastsim_cpu.centred(x, y, rows, columns, offsets, largest)
        return rows, columns, offsets, largest

    def chosen_rows(self, x, y, columns, distances, missing):
        x, y = x.contiguous(), None if y is None else y.contiguous()
        values = x.new_empty(columns.shape)
        for row, value in zip(values, missing, strict=True):
            row.fill_(value)
        torch.ops.fastsim_cpu.chosen_rows(x, y, columns, distances, values)
        return values

    def chosen_rows_backward(self, grad, values, x, y, columns, distances, wants):
        x, y = x.contiguous(), None if y is None else y.contiguous()
        grads = [x.new_zeros(s.shape) if w else None for s, w in zip((x, y), wants, strict=True)]
        values = values if distances else None
        torch.ops.fastsim_cpu.chosen_rows_backward(grad.contiguous(), values, x, y, columns, *grads)
        return grads

    def row_terms(self, x, y, columns, first):
        columns = _with_positives(columns, first)
        pairs = self.chosen_rows(x, y, columns, False, (0, 0))
        return pairs, torch.mv(x, y.sum(0))

    def row_terms_backward(self, grad_pairs, grad_sums, x, y, columns, first, wants):
        columns = _with_positives(columns, first)
        x, y = x.contiguous(), y.contiguous()
        grad_x = torch.outer(grad_sums, y.sum(0)) if wants[0] else None
        grad_y = torch.mv(x.T, grad_sums).repeat(len(y), 1) if wants[1] else None
        torch.ops.fastsim_cpu.chosen_rows_backward(
            grad_pairs.contiguous(), None, x, y, columns, grad_x, grad_y
        )
        return grad_x, grad_y

    def max_sim(self, x, y, cosine, own, scores, places):
        max_sim.max_sim(x, y, cosine, own, scores, places)

    def max_sim_backward(self, grad, places, x, y, cosine, own, wants):
        return max_sim.max_sim_backward(grad, places, x, y, cosine, own, wants)

    def top_k(self, queries, corpus, k):
        unit_x, unit_y = self.unit_rows(queries)[0], self.unit_rows(corpus)[0]
        shape = (queries.shape[0], k)
        values = torch.full(shape, -torch.inf, dtype=unit_x.dtype)
        indices = torch.full(shape, -1)
        blocks, workspace = self._seen_once(unit_x, unit_y)
        for block in blocks:
            torch.ops.fastsim_cpu.top_k(
                self.scores(unit_x, unit_y, block, workspace),
                *pair_arguments(Pairs(), block),
                k,
                values[block[0]],
                indices[block[0]],
            )
        return values, indices

    def cosent(self, scores, labels, scale, want_score_grad):
        compute = scores.to(torch.promote_types(scores.dtype, torch.float32)).contiguous()
        if labels.dtype in (torch.bool, torch.float16, torch.bfloat16):
            labels = labels.to(torch.float32)
        loss = torch.empty((), dtype=torch.float64)
        score_grad = torch.empty_like(compute) if want_score_grad else None
        torch.ops.fastsim_cpu.cosent(compute, labels.contiguous(), scale, loss, score_grad)
        return loss.to(compute.dtype), score_grad


class _Positives:
    """The scores of the positives in a panel, which no guide leaves out."""

    def __init__(self, pairs, block, panel):
        rows, columns = block
        within = (pairs.positives[rows] - columns.start)[:, None]
        self.inside = (within >= 0) & (within < panel.shape[1])
        self.columns = within.clamp(0, panel.shape[1] - 1)
        self.scores = panel.gather(1, self.columns)

    def restore(self, panel):
        scores = torch.where(self.inside, self.scores, panel.gather(1, self.columns))
        panel.scatter_(1, self.columns, scores)
