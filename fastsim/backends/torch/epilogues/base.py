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
    """Whether a number is not 0.

    A compiled step has tensors in place of numbers, except for those that are 0
    (`compiled.OFTEN_ZERO`).
    """
    return isinstance(number, torch.Tensor) or number != 0


def wide(*parts):
    """The tensors in the type of sums."""
    return [part.to(wide_dtype(part.device)) for part in parts]


def exp_relative(scores, top, scale, out=None):
    """exp(scale (s - top)) for a `top` that broadcasts."""
    return torch.sub(scores, top, out=out).mul_(scale).exp_()


def maxima(scores, dim):
    """The largest scores along a dimension, which is kept."""
    return scores.amax(dim, keepdim=True).clamp_(min=LOWEST)


def exponentials(scores, scale, dim, out=None):
    """(maxima, sums of exponentials relative to them) along a dimension."""
    top = maxima(scores, dim)
    return top.squeeze(dim), exp_relative(scores, top, scale, out).sum(dim)


def zeroed(block, matrix):
    """The matrix, in which the pairs that are left out are set to 0."""
    block.fill(matrix, 0)
    return matrix
