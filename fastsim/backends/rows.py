"""Plain torch formulas of what a backend does with single rows, for those without a kernel.

A row's chosen rows are the few columns chosen for it: columns (K, N), negative for none.
"""

import torch

from fastsim.backends.bands import bands
from fastsim.precision import wide_dtype, widened


def centred(x, y):
    """`Backend.centred`."""
    centre = (x if y is None else y).mean(0, dtype=wide_dtype(x.device)).to(x.dtype)
    sides = [(side - centre).contiguous() for side in (x, y) if side is not None]
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=wide_dtype(x.device)) for side in sides]
    largest = torch.cat(norms).amax()
    unit = torch.where(largest == 0, 1.0, largest)
    # Twice the square root: one over a subnormal norm is no float32.
    root = unit.rsqrt().to(x.dtype)
    for side in sides:
        side.mul_(root).mul_(root)
    offsets = (0.5 * (norms[-1] * root.to(norms[-1].dtype).square()).square()).to(x.dtype)
    return sides[0], None if y is None else sides[1], offsets, largest.to(x.dtype)


def chosen_rows(x, y, columns, distances, missing):
    """`Backend.chosen_rows`."""
    y = x if y is None else y
    values = [
        torch.where(some >= 0, _pairs(x, y, some.clamp(min=0), distances), instead)
        for some, instead in zip(columns, missing, strict=True)
    ]
    return torch.stack(values)


def chosen_rows_backward(grad, values, x, y, columns, distances, wants):
    """`Backend.chosen_rows_backward`."""
    score_grads = torch.where(columns >= 0, grad, 0.0)
    if distances:
        # In float64: one over a subnormal distance is no float32.
        inverse = 1 / widened(values)
        score_grads = torch.where((columns >= 0) & (values != 0), grad * inverse, 0.0)
    other, columns = x if y is None else y, columns.clamp(min=0)
    grads = [torch.zeros_like(s) if want else None for s, want in zip((x, y), wants, strict=True)]
    to_rows, to_columns = grads if y is not None else grads[:1] * 2
    for some, score_grad in zip(columns, score_grads, strict=True):
        for rows in bands(x):
            if distances:
                pull = x[rows] - other.index_select(0, some[rows])
                pull *= score_grad[rows, None]
                if to_rows is not None:
                    to_rows[rows] += pull
                if to_columns is not None:
                    add_rows(to_columns, some[rows], -pull)
                continue
            if to_rows is not None:
                found = other.index_select(0, some[rows])
                to_rows[rows].addcmul_(found, score_grad[rows, None])
            if to_columns is not None:
                add_rows(to_columns, some[rows], x[rows] * score_grad[rows, None])
    return grads


def row_terms(x, y, columns, first):
    """`Backend.row_terms`."""
    positives = slice(first, first + len(x))
    pairs = _pairs(x, y[positives], None, False), _pairs(x, y, columns.clamp(min=0), False)
    return torch.stack([pairs[0], torch.where(columns >= 0, pairs[1], 0.0)]), torch.mv(x, y.sum(0))


def row_terms_backward(grad_pairs, grad_sums, x, y, columns, first, wants):
    """`Backend.row_terms_backward`."""
    positives = slice(first, first + len(x))
    positive, closest = grad_pairs
    closest = torch.where(columns >= 0, closest, 0.0)
    columns = columns.clamp(min=0)
    grad_x = grad_y = None
    if wants[0]:
        grad_x = y[positives] * positive[:, None]
        grad_x.addr_(grad_sums, y.sum(0))
        for rows in bands(x):
            found = y.index_select(0, columns[rows])
            grad_x[rows].addcmul_(found, closest[rows, None])
    if wants[1]:
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
    """relu(near - far + margin) (N,), NaN for an infinite far; margin: a number or ()."""
    return (near - far).add_(margin).relu_().add_(far, alpha=0)  # inf * 0 is NaN


def gap_gradients(grad, near, far, margin, factor):
    """dL/dnear = -dL/dfar (N,) from the gradient of `Backend.triplet_losses`, with its factor."""
    grad = grad if factor is None else factor * grad
    return torch.where(triplet_losses(near, far, margin) <= 0, 0.0, grad)  # a NaN is not at most 0


def triplet_distances_backward(grad, anchors, positives, negatives, near, far, wants):
    """`Backend.triplet_distances_backward`."""
    to_positives = _gaps(anchors, positives).mul_(_over(grad, near)[:, None])
    to_negatives = _gaps(anchors, negatives).mul_(_over(-grad, far)[:, None])
    to_anchors = (to_positives + to_negatives).neg_() if wants[0] else None
    grads = zip((to_anchors, to_positives, to_negatives), wants, strict=True)
    return [grad.to(anchors.dtype) if want else None for grad, want in grads]


def _gaps(anchors, others):
    return others.to(torch.promote_types(others.dtype, torch.float32)) - anchors


def _over(grad, norm):
    """grad / norm (N,), 0 where the norm is."""
    return (grad / norm).masked_fill_(norm == 0, 0.0)


def add_rows(out, rows, values):
    """Adds values to the given rows of `out`, duplicates in one order on any device."""
    if out.is_cuda:
        return out.index_put_((rows,), values, accumulate=True)
    return out.index_add_(0, rows, values)


def take_rows(values, rows):
    """values[rows], whose gradient adds duplicates as `add_rows` does, those of 16 bits in 32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.requires_grad and dtype != values.dtype:
        return take_rows(values.to(dtype), rows).to(values.dtype)
    # On a CPU that of the brackets is added up by all threads at once, in any order.
    return values[rows] if values.is_cuda else values.index_select(0, rows)


def _pairs(x, y, columns, distances):
    """Distance or product of each row of x with a row of y, the same or the one named."""
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
    """|gap| of the vectors in the last dimension; at 0 every derivative is 0.

    In float64, where the squares of small numbers do not vanish.
    """
    squares = widened(gaps).square().sum(-1)
    zero = squares == 0  # which a NaN is not
    return squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0).to(gaps.dtype)


def multiplied(parts, grad, wants, *, spent=False):
    """Those that are wanted of dL/dx, dL/dy and of the scalars, times the gradient from above.

    spent: in the place of the parts.
    """
    wanted = wants[0], wants[1], wants[2] or wants[3]
    times = torch.Tensor.mul_ if spent else torch.mul
    return [times(part, grad) if want else part for part, want in zip(parts, wanted, strict=True)]
