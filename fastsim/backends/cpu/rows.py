"""Operations on rows of the CPU backend: norms, cosines of pairs, distances, chosen rows."""

import torch

from fastsim.backends.cpu import amx, memory
from fastsim.backends.cpu.lazy_rows import LazyUnitRows
from fastsim.operators import traced
from fastsim.precision import compute_dtype


def _with_positives(columns, first):
    """(2, N): for each row its positive, from the column `first` on, and its entry of `columns`."""
    return torch.stack([torch.arange(first, first + len(columns), device=columns.device), columns])


def _through_unit_rows(grad_unit, x, inverse, factor, grad):
    """Writes the gradient of x to `grad`, which may be `grad_unit` itself.

    Returns the dot products (N,) of the unit rows and their gradients.
    """
    dots = torch.empty_like(inverse)
    torch.ops.fastsim_cpu.unit_rows_backward(grad_unit, x, inverse, factor.item(), grad, dots)
    return dots


class Rows:
    """The part of `CpuBackend` that works on single rows, and on pairs of rows."""

    def unit_rows(self, x, dtype=None):
        dtype = dtype or compute_dtype(x)
        unit = memory.empty(x.shape, dtype)
        inverse = x.new_empty(x.shape[0], dtype=dtype)
        torch.ops.fastsim_cpu.unit_rows(x, unit, inverse)
        return unit, inverse

    def scored_rows(self, x):
        return LazyUnitRows(x)

    def tile_rows(self, x):
        return amx.ScaledRows.of(x) if amx.parts(x.dtype) else self.unit_rows(x)

    def plain_rows(self, x):
        if x.dtype.itemsize == 2 and amx.parts(x.dtype):
            return amx.ScaledRows.as_they_are(x), x.new_ones(x.shape[0], dtype=torch.float32)
        return super().plain_rows(x)

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        grad = memory.empty(x.shape, dtype)
        return grad, _through_unit_rows(grad_unit, x, inverse, factor, grad)

    def tile_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        if grad_rows.dtype != dtype:
            return self.unit_rows_backward(grad_rows, x, inverse, factor, dtype)
        return grad_rows, _through_unit_rows(grad_rows, x, inverse, factor, grad_rows)

    def prefix_rows(self, x, before):
        if amx.serves_sweep(amx.parts(x.dtype)):
            norms = torch.hypot(before, torch.linalg.vector_norm(x, dim=1, dtype=torch.float64))
            return amx.ScaledRows.of_norms(x, norms), norms
        rows = x.new_empty(x.shape, dtype=compute_dtype(x))
        norms = before.clone()
        torch.ops.fastsim_cpu.prefix_rows(x, norms, rows)
        return rows, norms

    def prefix_rows_dots(self, grad_rows, x, inverse, dots):
        torch.ops.fastsim_cpu.prefix_rows_dots(grad_rows, x, inverse, dots)

    def prefix_rows_backward(self, grad_rows, x, along, inverse, grad):
        torch.ops.fastsim_cpu.prefix_rows_backward(grad_rows, x, along, inverse, grad)

    def paired_cosines(self, x, y):
        dtype = compute_dtype(x)
        cosines = x.new_empty(x.shape[0], dtype=dtype)
        inverse = x.new_empty(2, x.shape[0], dtype=dtype)
        torch.ops.fastsim_cpu.paired_cosines(x, y, cosines, inverse)
        return cosines, inverse

    def paired_squared_errors(self, x, y, targets, factor):
        total = x.new_empty((), dtype=compute_dtype(x))
        targets = targets.to(total.dtype).contiguous()
        torch.ops.fastsim_cpu.paired_squared_errors.default(x, y, targets, factor, total)
        return total

    def paired_cosines_backward(self, grad, x, y, cosines, inverse, needs_grad):
        grads = [
            side.new_empty(side.shape if want else 0)
            for side, want in zip((x, y), needs_grad, strict=True)
        ]
        torch.ops.fastsim_cpu.paired_cosines_backward(
            grad,
            x,
            y,
            cosines,
            inverse,
            *(grad if want else None for grad, want in zip(grads, needs_grad, strict=True)),
        )
        return tuple(grads)

    def equal_counts(self, values, among):
        if traced():
            return super().equal_counts(values, among)
        counts = torch.empty_like(values)
        torch.ops.fastsim_cpu.equal_counts.default(values, among, counts)
        return counts

    def triplet_distances(self, anchors, positives, negatives):
        near = _row_numbers(anchors)
        far = torch.empty_like(near)
        sides = anchors, positives, negatives
        torch.ops.fastsim_cpu.triplet_distances.default(*sides, 0.0, 1.0, near, far, None)
        return near, far

    def triplet_losses(self, anchors, positives, negatives, margin, factor):
        near = _row_numbers(anchors)
        far = torch.empty_like(near)
        losses = near.new_empty(near.shape if factor is None else ())
        numbers = margin, 1.0 if factor is None else factor
        sides = anchors, positives, negatives
        torch.ops.fastsim_cpu.triplet_distances.default(*sides, *numbers, near, far, losses)
        return near, far, losses

    def triplet_distances_backward(
        self, grad, anchors, positives, negatives, near, far, needs_grad
    ):
        sides = anchors, positives, negatives
        return _through_distances(grad, sides, near, far, needs_grad, margin=None, factor=1.0)

    def triplet_losses_backward(
        self, grad, anchors, positives, negatives, near, far, *, needs_grad, margin, factor
    ):
        sides, factor = (anchors, positives, negatives), 1.0 if factor is None else factor
        options = {"needs_grad": needs_grad, "margin": margin, "factor": factor}
        return _through_distances(grad, sides, near, far, **options)

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

    def chosen_rows_backward(self, grad, values, x, y, columns, distances, needs_grad):
        x, y = x.contiguous(), None if y is None else y.contiguous()
        grads = [
            x.new_zeros(side.shape) if want else None
            for side, want in zip((x, y), needs_grad, strict=True)
        ]
        values = values if distances else None
        torch.ops.fastsim_cpu.chosen_rows_backward(grad.contiguous(), values, x, y, columns, *grads)
        return grads

    def row_terms(self, x, y, columns, first):
        pairs = self.chosen_rows(x, y, _with_positives(columns, first), False, (0, 0))
        # The products of x and the sum of y. torch.mv would round them by the number of threads. So
        # the sum becomes a matrix of one row, which `chosen_rows` chooses for every row of x.
        first_row = columns.new_zeros(1, len(x))
        return pairs, self.chosen_rows(x, y.sum(0, keepdim=True), first_row, False, (0,))[0]

    def row_terms_backward(self, grad_pairs, grad_sums, x, y, columns, first, needs_grad):
        columns = _with_positives(columns, first)
        x, y = x.contiguous(), y.contiguous()
        grad_x, grad_y = (
            memory.empty(side.shape, side.dtype) if want else None
            for side, want in zip((x, y), needs_grad, strict=True)
        )
        if needs_grad[0]:
            torch.outer(grad_sums, y.sum(0), out=grad_x)
        if needs_grad[1]:
            common = x.new_empty(1, x.shape[1])  # the part that all rows of y share
            torch.ops.fastsim_cpu.multiply(grad_sums[:, None], x, common, True, False)
            grad_y.copy_(common.expand(y.shape))
        torch.ops.fastsim_cpu.chosen_rows_backward(
            grad_pairs.contiguous(), None, x, y, columns, grad_x, grad_y
        )
        return grad_x, grad_y


def _through_distances(grad, sides, near, far, needs_grad, *, margin, factor):
    """The gradients of anchors, positives and negatives, `sides`; None where not needed.

    margin: that of the losses; None if `grad` is the gradient of the distances.
    factor: by which the losses are multiplied.
    """
    grads = [
        side.new_empty(side.shape) if want else None
        for side, want in zip(sides, needs_grad, strict=True)
    ]
    torch.ops.fastsim_cpu.triplet_distances_backward.default(
        grad.contiguous(), *sides, near, far, margin, factor, *grads
    )
    return grads


def _row_numbers(x):
    """Memory (N,) for one number of each row, in the compute dtype."""
    return x.new_empty(x.shape[0], dtype=compute_dtype(x))
