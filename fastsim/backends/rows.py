"""Formulas over single rows in plain torch, for backends without a kernel for them.

Chosen rows: columns[k, i] is the k-th row of y that was chosen for x_i, negative for none.
"""

import torch

from fastsim.backends.bands import bands
from fastsim.precision import compute_dtype, wide_dtype, widened


def centred(x, y):
    """`Backend.centred`."""
    centre = (x if y is None else y).mean(0, dtype=wide_dtype(x.device)).to(x.dtype)
    sides = [(side - centre).contiguous() for side in (x, y) if side is not None]
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=wide_dtype(x.device)) for side in sides]
    largest = torch.cat(norms).amax()
    unit = torch.where(largest == 0, 1.0, largest)
    # Two factors, as 1 / norm overflows float32 if the norm is subnormal.
    root = unit.rsqrt().to(x.dtype)
    for side in sides:
        side.mul_(root).mul_(root)
    offsets = (0.5 * (norms[-1] * root.to(norms[-1].dtype).square()).square()).to(x.dtype)
    return sides[0], None if y is None else sides[1], offsets, largest.to(x.dtype)


def chosen_rows(x, y, columns, distances, missing):
    """`Backend.chosen_rows`."""
    y = x if y is None else y
    values = [
        torch.where(chosen >= 0, _pairs(x, y, chosen.clamp(min=0), distances), default)
        for chosen, default in zip(columns, missing, strict=True)
    ]
    return torch.stack(values)


def chosen_rows_backward(grad, values, x, y, columns, distances, needs_grad):
    """`Backend.chosen_rows_backward`."""
    score_grads = torch.where(columns >= 0, grad, 0.0)
    if distances:
        # In float64, as 1 / distance overflows float32 if the distance is subnormal.
        inverse = 1 / widened(values)
        score_grads = torch.where((columns >= 0) & (values != 0), grad * inverse, 0.0)
    other, columns = x if y is None else y, columns.clamp(min=0)
    grads = [
        torch.zeros_like(s) if want else None for s, want in zip((x, y), needs_grad, strict=True)
    ]
    to_rows, to_columns = grads if y is not None else grads[:1] * 2
    for chosen, score_grad in zip(columns, score_grads, strict=True):
        for rows in bands(x):
            if distances:
                pull = x[rows] - other.index_select(0, chosen[rows])
                pull *= score_grad[rows, None]
                if to_rows is not None:
                    to_rows[rows] += pull
                if to_columns is not None:
                    add_rows(to_columns, chosen[rows], -pull)
                continue
            if to_rows is not None:
                others = other.index_select(0, chosen[rows])
                to_rows[rows].addcmul_(others, score_grad[rows, None])
            if to_columns is not None:
                add_rows(to_columns, chosen[rows], x[rows] * score_grad[rows, None])
    return grads


def row_terms(x, y, columns, first):
    """`Backend.row_terms`."""
    positives = slice(first, first + len(x))
    pairs = _pairs(x, y[positives], None, False), _pairs(x, y, columns.clamp(min=0), False)
    return torch.stack([pairs[0], torch.where(columns >= 0, pairs[1], 0.0)]), torch.mv(x, y.sum(0))


def row_terms_backward(grad_pairs, grad_sums, x, y, columns, first, needs_grad):
    """`Backend.row_terms_backward`."""
    positives = slice(first, first + len(x))
    positive, closest = grad_pairs
    closest = torch.where(columns >= 0, closest, 0.0)
    columns = columns.clamp(min=0)
    grad_x = grad_y = None
    if needs_grad[0]:
        grad_x = y[positives] * positive[:, None]
        grad_x.addr_(grad_sums, y.sum(0))
        for rows in bands(x):
            others = y.index_select(0, columns[rows])
            grad_x[rows].addcmul_(others, closest[rows, None])
    if needs_grad[1]:
        grad_y = torch.mv(x.T, grad_sums).repeat(len(y), 1)
        grad_y[positives].addcmul_(x, positive[:, None])
        for rows in bands(x):
            add_rows(grad_y, columns[rows], x[rows] * closest[rows, None])
    return grad_x, grad_y


def triplet_distances(anchors, positives, negatives):
    """`Backend.triplet_distances`."""
    gaps = (_gaps(anchors, side) for side in (positives, negatives))
    return tuple(torch.linalg.vector_norm(gap, dim=1) for gap in gaps)


def triplet_losses(near, far, margin):
    """relu(near - far + margin) (N,), NaN where far is infinite; margin: a number or ()."""
    return (near - far).add_(margin).relu_().add_(far, alpha=0)  # inf * 0 is NaN


def gap_gradients(grad, near, far, margin, factor):
    """dL/dnear = -dL/dfar (N,) from the gradient of `Backend.triplet_losses`."""
    grad = grad if factor is None else factor * grad
    return torch.where(triplet_losses(near, far, margin) <= 0, 0.0, grad)  # of NaN: grad


def triplet_distances_backward(grad, anchors, positives, negatives, near, far, needs_grad):
    """`Backend.triplet_distances_backward`."""
    to_positives = _gaps(anchors, positives).mul_(_over(grad, near)[:, None])
    to_negatives = _gaps(anchors, negatives).mul_(_over(-grad, far)[:, None])
    to_anchors = (to_positives + to_negatives).neg_() if needs_grad[0] else None
    grads = zip((to_anchors, to_positives, to_negatives), needs_grad, strict=True)
    return [grad.to(anchors.dtype) if want else None for grad, want in grads]


def _gaps(anchors, others):
    return others.to(compute_dtype(others)) - anchors


def _over(grad, norm):
    """grad / norm (N,), 0 where the norm is 0."""
    return (grad / norm).masked_fill_(norm == 0, 0.0)


def add_rows(out, rows, values):
    """out[rows] += values. Duplicates are added in a fixed order on any device."""
    if out.is_cuda:
        return out.index_put_((rows,), values, accumulate=True)
    return out.index_add_(0, rows, values)


def take_rows(values, rows):
    """values[rows]. Its gradient adds duplicates as `add_rows` does, 16-bit values in float32."""
    dtype = compute_dtype(values)
    if values.requires_grad and dtype != values.dtype:
        return take_rows(values.to(dtype), rows).to(values.dtype)
    # On a CPU the gradient of values[rows] is added up by several threads in any order.
    return values[rows] if values.is_cuda else values.index_select(0, rows)


def _pairs(x, y, columns, distances):
    """|x_i - y_j| with `distances`, else x_i . y_j, (N,) with j = columns[i]; None means j = i."""
    if not len(x):  # one rank of a group may have no rows
        return x.new_empty(0)
    parts = []
    for rows in bands(x):
        # Not y[columns[rows]], which takes four times as long on a CPU.
        other = y[rows] if columns is None else y.index_select(0, columns[rows])
        if distances:
            parts.append(norms(x[rows] - other))
        else:
            parts.append(torch.linalg.vecdot(x[rows], other))
    return torch.cat(parts)


def norms(gaps):
    """The norms of the vectors in the last dimension; at 0 every derivative is 0.

    Squares are summed in float64, in which those of small numbers do not underflow.
    """
    squares = widened(gaps).square().sum(-1)
    zero = squares == 0  # False for NaN, which stays
    return squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0).to(gaps.dtype)


def parts_needed(needs_grad):
    """Which of dL/dx, dL/dy and dL/d(scale, bias) are needed.

    needs_grad: which of x, y, scale and bias need a gradient.
    """
    return needs_grad[0], needs_grad[1], needs_grad[2] or needs_grad[3]


def multiplied(parts, grad, needed, *, spent=False):
    """The gradients in `parts`, times `grad` () where they are needed.

    needed: a flag for each part. spent: whether to overwrite `parts`.
    """
    times = torch.Tensor.mul_ if spent else torch.mul
    return [times(part, grad) if need else part for part, need in zip(parts, needed, strict=True)]
