"""A tile loss in one call.

All scores are in memory at once, since the batch is small or x is compared with itself; or the loss
has a state of rows alone and is computed band by band.
"""

import ctypes
import functools
import math
from itertools import chain
from operator import attrgetter

import torch

from fastsim.backends.cpu import amx, amx_loss, blas, memory, triplet
from fastsim.backends.cpu.library import UNAVAILABLE
from fastsim.backends.cpu.sizes import KEPT, WIDEST, band_rows, is_one_block, rows_kept
from fastsim.precision import compute_dtype

SERVED = (
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
# Up to this many multiply-adds of a product, one call in float32 is faster than products of
# bfloat16 parts.
SMALL = 1 << 27
SMALL_OF_ONE_PART = 3 << 23  # if operands have one bfloat16 part
SMALL_OF_BFLOAT16 = 5 << 20  # if rows are bfloat16, and one call computes their products too
_NO_GUIDE = None, None, 0.0, False
_NO_FACTORS = None, None, False
_guide = attrgetter("rows", "columns", "margin", "relative")
_in_one_call = None if UNAVAILABLE else torch.ops.fastsim_cpu.in_one_call.default


class InOneCall:
    """The part of `CpuBackend` that computes a loss in one call."""

    one_call_weighs_rows = True
    one_call_records_metrics = True
    checks_bias = True

    def serves_one_call(self, tile, rows, columns, width, self_similarity, dtype):
        pairs = tile.pairs
        if tile.kind not in SERVED or tile.hardness:
            return False
        if pairs.untargeted or pairs.offset or pairs.sliced:
            return False
        if pairs.guide is not None and pairs.guide.thresholds is not None:
            return False
        if triplet.is_large(tile, rows, columns, width):
            panels = self_similarity or blas_is_faster(rows, columns, width, dtype)
            return not panels and columns <= WIDEST and triplet.serves(tile)
        if blas_is_faster(rows, columns, width, dtype):
            return False
        if not self_similarity and parts_serve_loss(tile, rows, columns, width, dtype):
            return True
        # Panels with such products are faster than one call in float32 on a matrix unit. With
        # AVX512_BF16 they are too, unless the call also computes the scores of a teacher.
        panels = parts_are_faster(rows, columns, width, dtype, SMALL_OF_ONE_PART)
        if panels and (amx.is_matrix_unit() or not pairs.factors):
            return False
        if self_similarity:  # larger batches are left to `mirrored`
            return rows * rows * panels_of(pairs) <= KEPT
        return is_one_block(rows, columns) or _in_bands(tile, columns)

    def sums_prefixes(self, tile, rows, columns, width, dtype):
        shape = rows, columns, width
        in_parts = parts_are_faster(*shape, dtype, SMALL_OF_ONE_PART)
        in_panels = in_parts or blas_is_faster(*shape, dtype)
        return not (in_panels or triplet.is_large(tile, *shape))

    def in_one_call(self, tile, x, y, scale, bias, weights, needs_grad, totals=None, prefixes=None):
        want_x, want_y = needs_grad or (False, False)
        one_weight = not (isinstance(weights, torch.Tensor) and weights.ndim)
        dtype = compute_dtype(x)
        learns_scale = isinstance(scale, torch.Tensor)  # a number has no gradient
        scale, bias, weight = as_numbers(dtype, scale, bias, weights if one_weight else 0.0)
        loss = x.new_empty((), dtype=dtype)
        grad_x = gradient_memory(x, want_x, dtype) if needs_grad else None
        grad_y = gradient_memory(x if y is None else y, want_y, dtype) if needs_grad else None
        parameters = x.new_empty(2, dtype=torch.float64) if needs_grad else None
        (rows, width), columns = x.shape, (x if y is None else y).shape[0]
        row_weights = None if one_weight else weights
        grads = grad_x if want_x else None, grad_y if want_y else None
        if triplet.is_large(tile, rows, columns, width):
            in_parts = parts_are_faster(rows, columns, width, x.dtype, SMALL_OF_ONE_PART)
            parts = amx.parts(x.dtype) if in_parts else 0
            triplet.full_triplet(tile, x, y, parts, row_weights, weight, *grads, loss, totals)
            return (loss, grad_x, grad_y, parameters) if needs_grad else (loss,)
        two_sides = y is not None and prefixes is None
        in_parts = two_sides and parts_serve_loss(tile, rows, columns, width, x.dtype)
        scalars = scale, bias, weight, learns_scale, prefixes
        arguments = loss_arguments(tile, scalars, row_weights, unit_stride=in_parts)
        results = (*grads, loss, parameters, totals)
        if in_parts:
            x, y = amx.with_unit_stride(x), amx.with_unit_stride(y)
            amx_loss.loss(tile, x, y, arguments, results)
        else:
            tall = max(rows, 1) if y is None else band_rows(rows, columns, panels_of(tile.pairs))
            kept = rows_kept(rows, (tall, columns)) if tile.symmetric and needs_grad else 0
            _in_one_call(x, y, *arguments, tall, kept, *results)
        return (loss, grad_x, grad_y, parameters) if needs_grad else (loss,)


def loss_arguments(tile, scalars, row_weights, *, unit_stride=False):
    """The arguments that operators for a loss of two sides take between sides and results.

    scalars: (scale, bias, the weight of all rows, whether scale is learnt, prefixes). unit_stride:
    whether rows of guides and factors have to be contiguous.
    """
    scale, bias, weight, learns_scale, prefixes = scalars
    pairs = tile.pairs
    guide, above = pairs.guide, pairs.exclude_above
    guide_rows, guide_columns, guide_margin, guide_relative = (
        _NO_GUIDE if guide is None else _guide(guide)
    )
    factor_rows, factor_columns, factor_cosine = pairs.factors or _NO_FACTORS
    if unit_stride:
        guide_rows, guide_columns, factor_rows, factor_columns = (
            side if side is None else amx.with_unit_stride(side)
            for side in (guide_rows, guide_columns, factor_rows, factor_columns)
        )
    numbers = [  # in the order of csrc/cpu/one_call_arguments.h
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
    return (
        *pairs.tensors(),
        pairs.skip,
        tile.row_metrics,
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
        row_weights,
    )


def gradient_memory(x, needed, dtype):
    """Memory for the gradient of x if it is needed, else an empty tensor."""
    if not needed:
        return x.new_empty(0, dtype=dtype)
    grad = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return memory.in_huge_pages(grad)


def parts_serve_loss(tile, rows, columns, width, dtype):
    """Whether `amx_loss.loss` can compute this loss in one call, and is faster."""
    large = parts_pay_in_one_call(rows, columns, width, dtype)
    return large and amx_loss.serves(tile, columns, dtype)


def parts_pay_in_one_call(rows, columns, width, dtype):
    """Whether one call with products of bfloat16 parts is faster than one in float32."""
    small = SMALL_OF_BFLOAT16 if dtype == torch.bfloat16 else SMALL_OF_ONE_PART
    return parts_are_faster(rows, columns, width, dtype, small)


def parts_are_faster(rows, columns, width, dtype, small):
    """Whether products of bfloat16 parts are faster than one call in float32.

    small: for operands of one part, the most multiply-adds with which they are not.
    """
    size = rows * columns * width
    if size <= small:  # first, as torch.compile cannot trace `amx.parts`
        return False
    parts = amx.parts(dtype)
    return parts == 1 or (parts > 0 and size > SMALL)


def blas_is_faster(rows, columns, width, dtype):
    """Whether panels with products of a BLAS library are faster than one call."""
    large = rows * columns * width > SMALL
    return large and blas.IN_USE and dtype != torch.float64 and not amx.parts(dtype)


def panels_of(pairs):
    """The number of panels of scores that one call has in memory at once."""
    return 1 + (pairs.guide is not None) + (pairs.factors is not None)


def _in_bands(tile, columns):
    """Whether one call serves more rows than a block has, band by band.

    A symmetric softmax takes two passes over the bands.
    """
    in_bands = tile.rows_alone or tile.symmetric
    return in_bands and tile.pairs.skip == "nothing" and columns <= WIDEST


def as_numbers(dtype, *values):
    """The values (numbers and 0-d tensors) as Python numbers, rounded to the compute dtype."""
    numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return numbers if dtype == torch.float64 else _single(*numbers)


@functools.lru_cache
def _single(*numbers):
    return tuple(ctypes.c_float(number).value for number in numbers)
