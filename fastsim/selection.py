"""Selection over all pairs: the columns that count, and the few scores that are then needed."""

import torch

from fastsim.backends import get
from fastsim.operators import define
from fastsim.scores import without_autocast
from fastsim.targets import Pairs


def closest_column(unit_x, unit_y, dtype, semi_hard, pairs, backend):
    """Column (N,) int64 of each row's largest admitted cosine but its positive's; -1: none.

    unit_x (N, D), unit_y (M, D): unit rows in the compute type, of embeddings in `dtype`.
    """
    ids = pairs.row_ids, pairs.column_ids
    return _closest(
        unit_x.detach(), unit_y.detach(), dtype, pairs.positives, *ids, semi_hard, backend.name
    )


def _forward(unit_x, unit_y, dtype, positives, row_ids, column_ids, semi_hard, backend):
    chosen = get(backend)
    with without_autocast(unit_x.device.type):
        pairs = Pairs(positives, row_ids, column_ids)
        operands = chosen.operand(unit_x, dtype), chosen.operand(unit_y, dtype)
        return chosen.closest(pairs, semi_hard, *operands)


def _forward_fake(unit_x, unit_y, dtype, positives, row_ids, column_ids, semi_hard, backend):
    return torch.empty_like(positives)


_closest = define(
    "closest",
    "(Tensor unit_x, Tensor unit_y, ScalarType dtype, Tensor positives, Tensor? row_ids,"
    " Tensor? column_ids, bool semi_hard, str backend) -> Tensor",
    _forward,
    _forward_fake,
)


def add_rows(out, rows, values):
    """Adds values to the given rows of `out`, duplicates in one order on any device."""
    if out.is_cuda:
        return out.index_put_((rows,), values, accumulate=True)
    return out.index_add_(0, rows, values)


class RowTerms(torch.autograd.Function):
    """What a triplet loss needs of all scores, from unit rows x (N, D) and y (M, D), M >= N.

    RowTerms.apply(x, y, columns, first) ->
        (x_i . y_{first + i}, x_i . sum_j y_j, x_i . y_columns[i]), all (N,);
    a negative column stands for none, its score is 0. One function for the three, so that the
    backward pass holds one gradient of either side instead of three.
    """

    @staticmethod
    def forward(ctx, x, y, columns, first=0):
        ctx.save_for_backward(x, y, columns)
        ctx.positives = slice(first, first + len(x))
        sums = torch.mv(x, y.sum(0))
        return _paired(x, y[ctx.positives]), sums, _paired(x, y, columns.clamp(min=0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, positive, sums, closest):
        x, y, columns = ctx.saved_tensors
        closest = torch.where(columns >= 0, closest, 0.0)
        columns = columns.clamp(min=0)
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = y[ctx.positives] * positive[:, None]
            grad_x.addr_(sums, y.sum(0))
            for rows in _bands(x):
                found = y.index_select(0, columns[rows])
                grad_x[rows].addcmul_(found, closest[rows, None])
        if ctx.needs_input_grad[1]:
            grad_y = torch.mv(x.T, sums).repeat(len(y), 1)
            grad_y[ctx.positives].addcmul_(x, positive[:, None])
            for rows in _bands(x):
                add_rows(grad_y, columns[rows], x[rows] * closest[rows, None])
        return grad_x, grad_y, None, None


def _paired(x, y, columns=None):
    parts = []
    for rows in _bands(x):
        # Not y[columns[rows]], which takes four times as long on a CPU.
        other = y[rows] if columns is None else y.index_select(0, columns[rows])
        parts.append(torch.linalg.vecdot(x[rows], other))
    return torch.cat(parts)


def _bands(x):
    """Slices of rows whose temporaries stay small."""
    count, width = x.shape
    tall = max(1, (1 << 20) // width)
    return [slice(top, min(count, top + tall)) for top in range(0, count, tall)]


# ---- the hardest pairs by group ----


def hardest_columns(x, y, offsets, dtype, pairs, backend):
    """Columns ((N,), (N,)) int64 of each row's hardest positive and hardest negative; -1: none.

    x (N, D), y (M, D) or None for x itself, in the compute type; the lowest x_i . y_j - offsets_j
    of the row's group and the highest of any other. dtype: of the operands (`Backend.operand`).
    """
    column_groups = None if pairs.column_groups is pairs.row_groups else pairs.column_groups
    y = None if y is None else y.detach()
    groups = pairs.row_groups, column_groups
    return _hardest(x.detach(), y, offsets, dtype, *groups, pairs.skip, pairs.offset, backend.name)


def _hardest_forward(x, y, offsets, dtype, row_groups, column_groups, skip, offset, backend):
    chosen = get(backend)
    column_groups = row_groups if column_groups is None else column_groups
    pairs = Pairs(row_groups=row_groups, column_groups=column_groups, skip=skip, offset=offset)
    with without_autocast(x.device.type):
        left = chosen.operand(x, dtype)
        right = left if y is None else chosen.operand(y, dtype)
        return chosen.hardest(pairs, offsets, left, right)


def _hardest_fake(x, y, offsets, dtype, row_groups, column_groups, skip, offset, backend):
    return torch.empty_like(row_groups), torch.empty_like(row_groups)


_hardest = define(
    "hardest",
    "(Tensor x, Tensor? y, Tensor? offsets, ScalarType dtype, Tensor row_groups,"
    " Tensor? column_groups, str skip, int offset, str backend) -> (Tensor, Tensor)",
    _hardest_forward,
    _hardest_fake,
)
