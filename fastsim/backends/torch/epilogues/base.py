"""The interface of an epilogue, and exponentials relative to their maxima."""

import torch

from fastsim.backends.torch.block import LOWEST
from fastsim.precision import wide_dtype


class Epilogue:
    """One kind of loss on a panel of scores."""

    def prepare(self, tile, block):
        """Changes the scores before the other methods use them."""

    def forward(self, tile, block, sums=None):
        """The state of the panel: first of its rows, then of its columns.

        sums: the first two parts over all columns, if they are known already.
        """
        raise NotImplementedError

    def score_grad(self, tile, block, coefficients):
        """Turns the scores into dL/ds; coefficients: those of the panel's rows and columns."""
        raise NotImplementedError

    def fused(self, tile, block, weights):
        """The state of a panel of whole rows, or of all; turns its scores into dL/ds."""
        state = self.forward(tile, block)
        weights = 1.0 if weights is None else weights.to(state[0].dtype)
        self.score_grad(tile, block, narrowed(tile.coefficients(state, weights), block.panel))
        return state


def narrowed(coefficients, panel):
    """Coefficients in the panel's type."""
    return [c if c is None else c.to(panel.dtype) for c in coefficients]


def nonzero(number):
    """Whether a number is not 0; a tensor is known not to be (`compiled.OFTEN_ZERO`)."""
    return isinstance(number, torch.Tensor) or number != 0


def wide(*parts):
    return [part.to(wide_dtype(part.device)) for part in parts]


def exp_relative(scores, top, scale, out=None):
    """exp(scale (s - top)) for a `top` that broadcasts."""
    return torch.sub(scores, top, out=out).mul_(scale).exp_()


def extremes(scores, dim):
    return scores.amax(dim, keepdim=True).clamp_(min=LOWEST)


def exponentials(scores, scale, dim, out=None):
    """(maxima, sums of exponentials relative to them) along a dimension."""
    top = extremes(scores, dim)
    return top.squeeze(dim), exp_relative(scores, top, scale, out).sum(dim)


def block_zero(block, matrix):
    """The matrix with 0 at the pairs that are left out."""
    block.fill(matrix, 0)
    return matrix
