"""A tile loss in one call: a small batch, whose scores are one block, or a loss whose state is of
rows alone, band by band.
"""

import ctypes
import functools
import math
from itertools import chain
from operator import attrgetter

import torch

from fastsim.backends.cpu import amx, amx_loss, blas, triplet
from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.backends.cpu.sizes import WIDEST, are_two_panels, band_rows, is_one_block

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
SMALL = 1 << 27  # multiply-adds of a product up to which one call in float32 is faster
SMALL_OF_ONE_PART = 3 << 23  # the same where the other products are of one bfloat16 part
SMALL_OF_BFLOAT16 = 5 << 20  # and of such rows, where these too are made in one call
_NO_GUIDE = None, None, 0.0, False
_NO_FACTORS = None, None, False
_guide = attrgetter("rows", "columns", "margin", "relative")
_whole = None if UNAVAILABLE else torch.ops.fastsim_cpu.whole.default


class InOneCall:
    """The part of `CpuBackend` that makes a loss in one call."""

    weighs_whole = True
    observes_whole = True
    checks_bias = True

    def serves_whole(self, tile, rows, columns, width, together, dtype):
        pairs = tile.pairs
        if tile.kind not in WHOLE or tile.hardness:
            return False
        if pairs.untargeted or pairs.offset or pairs.sliced:
            return False
        if pairs.guide is not None and pairs.guide.thresholds is not None:
            return False
        if triplet.is_large(tile, rows, columns, width):
            panels = together or by_blas(rows, columns, width, dtype)
            return not panels and columns <= WIDEST and triplet.serves(tile)
        if by_blas(rows, columns, width, dtype):
            return False
        if not together and is_loss_of_parts(tile, rows, columns, width, dtype):
            return True
        # With a matrix unit, panels are faster than one call in float32. With AVX512_BF16 they are
        # too, unless the call makes two sets of scores (the other a teacher's).
        panels = of_parts(rows, columns, width, dtype, SMALL_OF_ONE_PART)
        if panels and (amx.is_matrix_unit() or not pairs.factors):
            return False
        return is_one_block(rows, columns) or (not together and _in_bands(tile, rows, columns))

    def sums_prefixes(self, tile, rows, columns, width, dtype):
        shape = rows, columns, width
        in_parts = of_parts(*shape, dtype, SMALL_OF_ONE_PART) or by_blas(*shape, dtype)
        return not (in_parts or triplet.is_large(tile, *shape))

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None, prefixes=None):
        want_x, want_y = wants or (False, False)
        pairs = tile.pairs
        guide, factors, above = pairs.guide, pairs.factors, pairs.exclude_above
        alike = not (isinstance(weights, torch.Tensor) and weights.ndim)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        learns_scale = isinstance(scale, torch.Tensor)  # a number has no gradient
        scale, bias, weight = numbers_of(dtype, scale, bias, weights if alike else 0.0)
        loss = x.new_empty((), dtype=dtype)
        grad_x = like(x, want_x, dtype) if wants else None
        grad_y = like(x if y is None else y, want_y, dtype) if wants else None
        parameters = x.new_empty(2, dtype=torch.float64) if wants else None
        (rows, width), columns = x.shape, (x if y is None else y).shape[0]
        of_rows = None if alike else weights
        grads = grad_x if want_x else None, grad_y if want_y else None
        if triplet.is_large(tile, rows, columns, width):
            in_parts = of_parts(rows, columns, width, x.dtype, SMALL_OF_ONE_PART)
            parts = amx.parts(x.dtype) if in_parts else 0
            triplet.full_triplet(tile, x, y, parts, of_rows, weight, *grads, loss, totals)
            return (loss, grad_x, grad_y, parameters) if wants else (loss,)
        guide_rows, guide_columns, guide_margin, guide_relative = (
            _NO_GUIDE if guide is None else _guide(guide)
        )
        factor_rows, factor_columns, factor_cosine = factors or _NO_FACTORS
        alone = y is not None and prefixes is None
        in_parts = alone and is_loss_of_parts(tile, rows, columns, width, x.dtype)
        if in_parts:
            x, y, guide_rows, guide_columns, factor_rows, factor_columns = (
                side if side is None else amx.side_by_side(side)
                for side in (x, y, guide_rows, guide_columns, factor_rows, factor_columns)
            )
        numbers = [  # in the order of csrc/cpu/whole_arguments.h
            pairs.negative_target,
            scale,
            bias,
            tile.margin,
            tile.positive_scale,
            tile.base,
            math.inf if above is None else above,
            guide_margin,
            weight,
            tile.normalise,
            tile.symmetric,
            tile.cosine,
            guide_relative,
            factor_cosine,
            learns_scale,
        ]
        if prefixes is not None:
            numbers.extend(chain.from_iterable(zip(*prefixes, strict=True)))
        given = (
            *pairs.tensors(),
            pairs.skip,
            tile.seen,
            tile.kind,
            numbers,
            guide_rows,
            guide_columns,
            pairs.column_bias,
            pairs.row_shift,
            factor_rows,
            factor_columns,
            tile.prior,
            tile.positive_weights,
            of_rows,
        )
        results = (*grads, loss, parameters, totals)
        if in_parts:
            amx_loss.loss(tile, x, y, given, results)
        else:
            _whole(x, y, *given, band_rows(rows, columns), *results)
        return (loss, grad_x, grad_y, parameters) if wants else (loss,)


def like(x, wanted, dtype):
    """Memory of the size of x, or of nothing."""
    if not wanted:
        return x.new_empty(0, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def is_loss_of_parts(tile, rows, columns, width, dtype):
    """Whether one call makes the products of bfloat16 parts."""
    large = is_large_for_parts(rows, columns, width, dtype)
    return large and amx_loss.serves(tile, columns, dtype)


def is_large_for_parts(rows, columns, width, dtype):
    """Whether products of these sizes in one call are those of bfloat16 parts, of a loss that has
    them.
    """
    small = SMALL_OF_BFLOAT16 if dtype == torch.bfloat16 else SMALL_OF_ONE_PART
    return of_parts(rows, columns, width, dtype, small)


def of_parts(rows, columns, width, dtype, small):
    """Whether products are those of bfloat16 parts: of more than `small` multiply-adds."""
    size = rows * columns * width
    if size <= small:  # torch.compile cannot trace what comes next
        return False
    parts = amx.parts(dtype)
    return parts == 1 or (parts > 0 and size > SMALL)


def by_blas(rows, columns, width, dtype):
    """Whether panels of products by a BLAS library outweigh their calls."""
    large = rows * columns * width > SMALL
    return large and blas.IN_USE and dtype != torch.float64 and not amx.parts(dtype)


def _in_bands(tile, rows, columns):
    """Whether the scores of more rows than a block has are served, a band of rows at a time.

    Rows against themselves take half the products elsewhere (`mirrored`), and the panels of a guide
    or of factors would come on top of those of a large batch.
    """
    pairs = tile.pairs
    alone = pairs.guide is None and pairs.factors is None
    served = pairs.skip == "nothing" and (alone or are_two_panels(rows, columns))
    return served and tile.rows_alone and columns <= WIDEST


def numbers_of(dtype, *values):
    """Numbers and 0-d tensors as numbers of the compute type."""
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return numbers if dtype == torch.float64 else _single(*numbers)


@functools.lru_cache
def _single(*numbers):
    return tuple(ctypes.c_float(number).value for number in numbers)
