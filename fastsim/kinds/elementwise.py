"""Losses with one term for each pair: SigLIP and the squared error."""

from fastsim.kinds.kind import Kind, Total, largest, largest_target


class Elementwise(Kind):
    """Base class; the first tensor of the state is the loss of each row."""

    elementwise = True

    def finish(self, tile, state):
        return state[0]

    def largest_of(self, tile, coefficients, columns):
        return self.largest_score_grad(tile, largest(coefficients[0]), columns)


class Sigmoid(Elementwise):
    """Binary cross entropy of z = scale s + bias against (t + 1) / 2.

    State: sum_j loss and sum_j dloss/dz of each row.
    """

    name = "sigmoid"
    state = Total(), Total()
    parameters = learns = ("scale", "bias")

    def largest_score_grad(self, tile, weights, columns):
        # dloss/dz = sigma(z) - (t + 1) / 2, for a positive times its weight
        bound = weights.amax() * tile.scale.abs() * (1 + largest_target(tile.pairs)) / 2
        if tile.positive_weights is None:
            return bound
        return bound * largest(tile.positive_weights).clamp(min=1)

    def bias_gradient(self, tile, state, grad):
        return (grad * state[1]).sum()


class SquaredError(Elementwise):
    """(s - t)^2, s less `Pairs.row_shift`. State: sum_j loss of each row."""

    name = "squared_error"
    state = (Total(),)
    parameters = learns = ()

    def largest_score_grad(self, tile, weights, columns):
        shift = tile.pairs.row_shift
        shift = 0.0 if shift is None else shift.abs().amax()
        return weights.amax() * 2 * (1 + largest_target(tile.pairs) + shift)


KINDS = (Sigmoid(), SquaredError())
