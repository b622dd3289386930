"""Softmax: InfoNCE, SupCon, matrix cross entropy, and log-sum-exps alone.

    L_i = T_i lse_j z_ij - sum_j t_ij z_ij,   z = scale s,   T_i = sum_j t_ij

The margin is first taken from the positives' scores. With `normalise` the targets of a row are
divided by T_i, and a row without any contributes 0. With `symmetric` it is the mean of the row
softmax and the column softmax of the positives. Without targets the log-sum-exps are returned, with
`symmetric` those of the columns too.
"""

import torch

from fastsim.collectives import all_reduce_sum
from fastsim.kinds.kind import COLUMNS, ROWS, Exponentials, Kind, OfPositive, Total, largest_target
from fastsim.kinds.kind import over as _over


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
        # A row without a target contributes nothing, whatever its log-sum-exp.
        return losses.masked_fill_((target_sums == 0) & (target_logits == 0), 0.0)

    def loss_shape(self, tile, rows, columns):
        return (rows + (columns if tile.symmetric and tile.pairs.untargeted else 0),)

    def coefficients(self, tile, state, grad):
        """Per row: top, weight of exp(scale (s - top)), weight of the target; per column the first
        two.

        Relative to the maximum rather than the log-sum-exp: a row of one candidate then has
        probability exactly 1 and score gradient exactly 0.
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
        pairs, scale = tile.pairs, tile.scale.abs()
        largest = weights.amax() * scale
        if pairs.untargeted:
            return largest * (1 + tile.symmetric)
        if tile.symmetric:
            shared = weights.new_zeros(columns)
            shared.index_put_((pairs.positives,), weights, accumulate=True)
            return largest + shared.amax() * scale
        if tile.normalise or pairs.one_positive:
            return largest
        # Of a pair it is T p - t, and the targets of a row may add up to T = columns max |t|.
        return largest * (columns + 1) * largest_target(pairs)

    def scale_gradient(self, tile, state, grad):
        """That of the margin: -margin * sum_i dL/dz at the positives."""
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
    """Per column, half the weights of the rows whose positive it is."""
    # Not index_add_, which adds duplicates in any order on a GPU.
    weight = torch.zeros_like(state[4])
    weight.index_put_((tile.pairs.positives,), 0.5 * grad, accumulate=True)
    return all_reduce_sum(weight, tile.group) if tile.group else weight


KINDS = (Softmax(),)
