"""Matryoshka: a loss summed over prefixes of the embeddings, so that each prefix is one itself.

    L = sum_w c_w loss(embeddings[:, :w])

Source: Kusupati et al. 2022, "Matryoshka Representation Learning", equation 1. The encoder, which
costs most, runs once. Each width is a loss of its own, whatever the loss: over all pairs it costs
N M w, so all of them sum_w w / D times the full one, less than twice for halving widths. The
unnormalised scores of a prefix are a partial sum of those of a longer one, but its slopes are not:
one product for all widths would hold the slope panels of all at once, weighed by their norms, in
passes that no loss but this would use. With `group=` in the loss each width is gathered by itself.
"""

import inspect

import torch

from fastsim.checks import FLOATING
from fastsim.losses.module import LossModule


class Matryoshka(torch.nn.Module):
    """A loss on the first `w` numbers of every embedding, summed over widths.

    loss: a loss module of fastsim, or any function of embeddings (N, D) and further arguments that
        returns a scalar; its embeddings are the positional arguments that are floating-point
        matrices, a target matrix excepted.
    widths: distinct ints. weights: as many numbers c_w, 1 by default.
    """

    def __init__(self, loss, widths, weights=None):
        super().__init__()
        widths = tuple(widths)
        for width in widths:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ValueError(f"widths: wanted positive ints, got {width!r}")
        if not widths or len(set(widths)) < len(widths):
            raise ValueError(f"widths: wanted at least one, all different, got {widths}")
        weights = (1.0,) * len(widths) if weights is None else tuple(weights)
        if len(weights) != len(widths):
            raise ValueError(f"weights: wanted {len(widths)}, one per width, got {len(weights)}")
        self.loss, self.widths, self.weights = loss, widths, weights
        names = inspect.signature(loss.function).parameters if isinstance(loss, LossModule) else ()
        self._targets = list(names).index("targets") if "targets" in names else None

    def forward(self, *arguments, **options):
        """The sum over the widths of the loss with these arguments."""
        places = [
            place
            for place, value in enumerate(arguments)
            if place != self._targets
            and isinstance(value, torch.Tensor)
            and value.dim() == 2
            and value.dtype in FLOATING
        ]
        if not places:
            raise TypeError("arguments: wanted embeddings (N, D), got none")
        full = min(arguments[place].shape[1] for place in places)
        if max(self.widths) > full:
            raise ValueError(f"widths: wanted at most {full}, got {max(self.widths)}")
        terms = []
        for width, weight in zip(self.widths, self.weights, strict=True):
            # The same tensor on both sides stays one.
            cut = {id(arguments[place]): arguments[place][:, :width] for place in places}
            part = [
                cut[id(value)] if place in places else value
                for place, value in enumerate(arguments)
            ]
            terms.append(weight * self.loss(*part, **options))
        return torch.stack(terms).sum()

    def extra_repr(self):
        return f"widths={self.widths}, weights={self.weights}"
