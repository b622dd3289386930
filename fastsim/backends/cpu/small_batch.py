"""A tile loss of a small batch in one call, whose scores are one block."""

import ctypes
import math
from operator import attrgetter

import torch

from fastsim.backends.cpu import amx
from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.backends.cpu.sizes import is_one_block

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
    "margins",
)
SMALL = 1 << 27  # multiply-adds of a product up to which one call is faster than a matrix unit
CHEAP = 1 << 24  # multiply-adds of a product that cost less than the calls it saves
_NO_GUIDE = None, None, 0.0, False
_NO_FACTORS = None, None, False
_guide = attrgetter("rows", "columns", "margin", "relative")
_whole = None if UNAVAILABLE else torch.ops.fastsim_cpu.whole.default


class SmallBatch:
    """The part of `CpuBackend` that serves a small batch in one call."""

    weighs_whole = True
    observes_whole = True

    def serves_whole(self, tile, rows, columns, width):
        pairs = tile.pairs
        if tile.kind not in WHOLE or tile.hardness:
            return False
        if pairs.untargeted or pairs.offset or pairs.sliced:
            return False
        if pairs.guide is not None and pairs.guide.thresholds is not None:
            return False
        # Without the calls it saves, a triplet loss needs no product but the scores.
        if tile.kind.endswith("triplet") and rows * columns * width > CHEAP:
            return False
        return _is_small(rows, columns, width)

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None):
        want_x, want_y = wants or (False, False)
        pairs = tile.pairs
        guide, factors, above = pairs.guide, pairs.factors, pairs.exclude_above
        alike = not (isinstance(weights, torch.Tensor) and weights.ndim)
        scale, bias = _number(scale, x.dtype), _number(bias, x.dtype)
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
            tile.seen,
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
            *(_NO_GUIDE if guide is None else _guide(guide)),
            pairs.column_bias,
            pairs.row_shift,
            *(factors or _NO_FACTORS),
            tile.prior,
            tile.positive_weights,
            None if alike else weights,
            _number(weights, x.dtype) if alike else 0.0,
            grad_x if want_x else None,
            grad_y if want_y else None,
            loss,
            parameters,
            totals,
        )
        return (loss, grad_x, grad_y, parameters) if wants else (loss,)

    def serves_further(self, rows, columns, width):
        return _is_small(rows, columns, width)

    def further(self, sides, directions, numbers, cosine, weights, wants, totals):
        dtype = torch.float64 if sides[0].dtype == torch.float64 else torch.float32
        x, y, own, references = sides
        scale, margin, smoothing = numbers
        own = None if own is None else own.flatten(0, 1)
        alike = not isinstance(weights, torch.Tensor)
        loss = torch.empty(() if weights is not None else x.shape[0], dtype=dtype)
        grads = [
            torch.empty(side.shape, dtype=dtype) if want else None
            for side, want in zip((x, y, own), wants, strict=True)
        ]
        torch.ops.fastsim_cpu.further.default(
            x,
            y,
            own,
            references,
            *directions,
            _number(scale, x.dtype),
            margin,
            smoothing,
            cosine,
            None if alike else weights,
            (weights or 0.0) if alike else 0.0,
            *grads,
            loss,
            totals,
        )
        if grads[2] is not None:
            grads[2] = grads[2].view(sides[2].shape)
        return loss, grads


def _is_small(rows, columns, width):
    """Whether one call pays; panels go through a matrix unit, which outweighs their calls."""
    if rows * columns * width > SMALL and amx.name():
        return False
    return is_one_block(rows, columns)


def _number(value, dtype):
    """A number or 0-d tensor as a number of the compute type."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if dtype == torch.float64 else ctypes.c_float(value).value
