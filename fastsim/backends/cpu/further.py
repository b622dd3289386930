"""InfoNCE with further candidates or label smoothing, in one call."""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends.cpu import amx, amx_loss
from fastsim.backends.cpu.one_call import (
    SMALL_OF_ONE_PART,
    as_numbers,
    blas_is_faster,
    gradient_memory,
    loss_arguments,
    panels_of,
    parts_are_faster,
    parts_pay_in_one_call,
)
from fastsim.backends.cpu.sizes import WIDEST, are_two_panels, band_rows
from fastsim.precision import compute_dtype

# References for each candidate, up to which one matrix with products of all parts is the fastest
# way. It computes a gradient of the references too, which nobody wants.
MOST_REFERENCES = 4

# The most scores with which plain torch is faster than a pass for each part, whose calls take
# longer than its products.
FEW = 1 << 19


class InOneSoftmax:
    """The part of `CpuBackend` for a softmax over several sets of candidates."""

    def serves_further(self, rows, columns, width, dtype, directions):
        if blas_is_faster(rows, columns, width, dtype):
            return False
        if are_two_panels(rows, columns):
            return True
        in_parts = parts_are_faster(rows, columns, width, dtype, SMALL_OF_ONE_PART)
        return not any(directions) and columns <= WIDEST and not in_parts

    def leaves_further(self, rows, columns, device):
        return rows * columns <= FEW

    def further(self, tile, sides, directions, scale, weights, needs_grad, totals):
        x, y, negatives, references = sides
        want_x, want_y, want_negatives, want_scale = needs_grad
        if negatives is None and not any(directions) and totals is None and weights is not None:
            result = _by_one_matrix(self, tile, sides, scale, weights, needs_grad)
            if result is not None:
                return result
        dtype = compute_dtype(x)
        # The derivative by scale follows from the gradients of the sides.
        want_x = want_x or want_scale
        want_y = want_y or (want_scale and any(directions))
        grads = [
            gradient_memory(side, want, dtype) if want else None
            for side, want in ((x, want_x), (y, want_y), (negatives, want_negatives))
        ]
        parameters = x.new_empty(2, dtype=torch.float64) if want_scale else None
        one_weight = not isinstance(weights, torch.Tensor)
        weight = (weights or 0.0) if one_weight else 0.0
        loss = x.new_empty(() if weights is not None else x.shape[0], dtype=dtype)
        scalars = *as_numbers(dtype, scale), 0.0, weight, want_scale, None
        torch.ops.fastsim_cpu.further.default(
            x,
            y,
            None if negatives is None else negatives.flatten(0, 1),
            references,
            *directions,
            *loss_arguments(tile, scalars, None if one_weight else weights),
            max(x.shape[0], 1) if any(directions) else _band_rows(tile, *sides),
            None if grads[2] is None else grads[2].flatten(0, 1),
            *grads[:2],
            loss,
            parameters,
            totals,
        )
        return loss, (*grads, parameters)


def _band_rows(tile, x, y, negatives, references):
    """The rows of a band, which has the scores of its rows and the unit rows of their negatives."""
    numbers = y.shape[0]
    numbers += 0 if references is None else references.shape[0]
    numbers += 0 if negatives is None else negatives.shape[1] * negatives.shape[2]
    return band_rows(x.shape[0], numbers, panels_of(tile.pairs))


def _by_one_matrix(backend, tile, sides, scale, weights, needs_grad):
    """(loss, gradients) from one matrix of scores, by products of bfloat16 parts; None if such
    products do not serve this loss.

    References become further columns.
    """
    x, y, _, references = sides
    rows, candidates, pairs = x.shape[0], y.shape[0], tile.pairs
    columns = candidates + (0 if references is None else references.shape[0])
    if not parts_pay_in_one_call(rows, columns, x.shape[1], x.dtype):
        return None
    if columns > (1 + MOST_REFERENCES) * candidates and amx.parts(x.dtype) == amx.ALL_PARTS:
        return None
    if not amx_loss.serves(tile, columns, x.dtype):
        return None
    if references is not None:
        if any(v is not None for v in (pairs.row_ids, pairs.guide, pairs.column_bias)):
            return None  # they have entries for the candidates alone
        with without_autocast("cpu"):  # autocast cannot concatenate rows of the other 16-bit type
            y = torch.cat([y, references])
    want_x, want_y, _, want_scale = needs_grad
    any_side = want_x or want_y or want_scale
    sides_of_grads = (want_x or want_scale, want_y) if any_side else None
    loss, *found = backend.in_one_call(tile, x, y, scale, 0.0, weights, sides_of_grads)
    if not found:
        return loss, (None,) * 4
    grad_x, grad_y, parameters = found
    return loss, (
        grad_x if want_x else None,
        grad_y[:candidates] if want_y else None,
        None,
        parameters if want_scale else None,
    )
