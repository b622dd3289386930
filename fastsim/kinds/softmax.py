"""Softmax: InfoNCE, SupCon, matrix cross entropy, and log-sum-exps alone.

    L_i = T_i lse_j z_ij - sum_j t_ij z_ij,   z = scale s,   T_i = sum_j t_ij

The margin is first subtracted from the scores of the positives. With `normalise` the targets of a
row are divided by T_i, and a row without targets has loss 0. With `symmetric` the loss of a row is
the mean of the row softmax and of the column softmax of its positive. Without targets the
log-sum-exps are returned, with `symmetric` those of the columns too.
"""

import torch

from fastsim.collectives import all_reduce_sum
from fastsim.kinds.kind import (
    COLUMNS,
    ROWS,
    Exponentials,
    Kind,
    OfPositive,
    Total,
    largest,
    largest_target,
)
from fastsim.kinds.kind import over as _over
from fastsim.precision import compute_dtype

PIECE = 1 << 25  # targets summed at a time, in float32


class Softmax(Kind):
    """State: top and sum of exponentials of each row, sum_j t z, sum_j t; `symmetric`: top and sum
    of each column.
    """

    name = "softmax"
    state = Exponentials(), Total(), Total()
    state_of_positives = Exponentials(), OfPositive(), OfPositive()
    state_of_columns = (Exponentials(COLUMNS),)
    parameters = ("scale", "margin")
    coefficient_axes = (ROWS, ROWS, ROWS, COLUMNS, COLUMNS)
    weights_at = (1, 2, 4)

    def parts(self, tile):
        rows = self.state_of_positives if tile.pairs.one_positive else self.state
        return rows + self.state_of_columns if tile.symmetric else rows

    def finish(self, tile, state):
        top, total, target_logits, target_sums = state[:4]
        lse = tile.scale * top + total.log()
        if tile.pairs.untargeted:
            of_columns = [tile.scale * state[4] + state[5].log()] if tile.symmetric else []
            return torch.cat([lse, *of_columns])
        if tile.symmetric:
            top, total = (column[tile.pairs.positives] for column in state[4:])
            lse = 0.5 * (lse + tile.scale * top + total.log())
        if tile.pairs.one_positive:
            return lse - target_logits
        if tile.normalise:
            losses = lse - target_logits / target_sums
        else:
            losses = lse * target_sums - target_logits
        # A row without targets has loss 0, whatever its log-sum-exp.
        return losses.masked_fill_((target_sums == 0) & (target_logits == 0), 0.0)

    def loss_shape(self, tile, rows, columns):
        return (rows + (columns if tile.symmetric and tile.pairs.untargeted else 0),)

    def coefficients(self, tile, state, grad):
        """Per row: top, weight of exp(scale (s - top)), weight of the target; per column: the first
        two.

        Exponentials are relative to the maximum, not to the log-sum-exp, so that a row with a
        single candidate has probability exactly 1 and score gradient exactly 0.
        """
        top, total, _, target_sums = state[:4]
        weight = grad * tile.scale
        if tile.pairs.untargeted:
            rows, columns = weight.split([top.numel(), weight.numel() - top.numel()])
            of_columns = (state[4], _over(columns, state[5])) if tile.symmetric else (None, None)
            return top, _over(rows, total), torch.zeros_like(top), *of_columns
        if not tile.symmetric:
            if tile.normalise:
                weight = _over(weight, target_sums)
            return top, _over(weight * target_sums, total), weight, None, None
        column_top, column_total = state[4:]
        of_columns = column_top, _over(column_weights(tile, state, weight), column_total)
        return top, _over(0.5 * weight, total), weight, *of_columns

    def largest_score_grad(self, tile, weights, columns):
        pairs = tile.pairs
        of_row = weights.amax() * tile.scale.abs()
        if pairs.untargeted:
            return of_row * (1 + tile.symmetric)
        if tile.symmetric and not pairs.distinct:
            of_column = _of_positives(tile, weights, columns).amax() * tile.scale.abs()
            return 0.5 * (of_row + of_column)
        if tile.normalise or pairs.one_positive:
            return of_row
        # dL/dz = T p - t lies between -t and T - t, T the sum of the row's targets.
        if pairs.dense is None or pairs.sliced:
            return of_row * columns * largest_target(pairs)
        return of_row * _largest_sum(pairs.dense)

    def largest_of(self, tile, coefficients, columns):
        _, of_row, of_target, _, of_column = coefficients
        of_row, of_target = largest(of_row), largest(of_target)
        if tile.normalise or tile.pairs.one_positive:
            # dL/ds is the difference of a term of the row and one of the target, of equal sign.
            bound = torch.maximum(of_row, of_target)
        else:
            bound = of_row + of_target * largest_target(tile.pairs)
        return bound if of_column is None else bound + largest(of_column)

    def scale_gradient(self, tile, state, grad):
        """The share of the margin: -margin * sum_i dL/dz_ip, p the positive of row i."""
        if not tile.margin:
            return 0.0
        top, total, positive_logits, _ = state[:4]
        score_grad = grad * ((positive_logits - tile.scale * top).exp() / total - 1)
        if tile.symmetric:
            top, total = (column[tile.pairs.positives] for column in state[4:])
            weight = column_weights(tile, state, grad)[tile.pairs.positives]
            probability = (positive_logits - tile.scale * top).exp() / total
            score_grad = 0.5 * (score_grad - grad) + weight * probability
        return -tile.margin * score_grad.sum()


def column_weights(tile, state, grad):
    """(M,) half the sum of the weights of the rows whose positive the column is."""
    weight = _of_positives(tile, 0.5 * grad, state[4].shape[0])
    return all_reduce_sum(weight, tile.group) if tile.group else weight


def _of_positives(tile, values, columns):
    """(M,) for each column the sum of the values (N,) or () of the rows whose positive it is."""
    sums = values.new_zeros(columns)
    # Not index_add_, which adds duplicates in any order on a GPU. Without duplicates, index_put_
    # does not need to sort.
    accumulate = not tile.pairs.distinct
    return sums.index_put_((tile.pairs.positives,), values, accumulate=accumulate)


def _largest_sum(targets):
    """max_i sum_j |t_ij| () of targets (N, M), float32 or wider."""
    tall = max(1, PIECE // max(1, targets.shape[1]))
    sums = []
    for piece in targets.split(tall):
        piece = piece.to(compute_dtype(piece))
        sums.append(torch.linalg.vector_norm(piece, ord=1, dim=1))
    return torch.cat(sums).amax()


KINDS = (Softmax(),)
