"""Matryoshka: a loss summed over prefixes of the embeddings, so that each prefix is usable alone.

    L = sum_w c_w loss(embeddings[:, :w])

Source: Kusupati et al. 2022, "Matryoshka Representation Learning", equation 1. The encoder, the
largest cost, runs once. The products of a prefix are part of those of a longer one. So InfoNCE,
SigLIP and other losses over pairs, in one process, run in one sweep over the widths, whose products
cost as much as those of the widest (fastsim/engine/sweep.py). On a CPU a small batch takes one call
of the backend for all widths, as the overhead of calls would dominate. Any other loss is computed
width by width, at sum_w w / D times the cost of the full width.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsim.checks import FLOATING, check_count, check_number
from fastsim.distributed import learnt_number
from fastsim.engine.sweep import sum_over
from fastsim.losses.module import LossModule

# Arguments of losses that are not embeddings of the model and keep their width.
_UNCUT = frozenset({"targets", "teacher_x", "teacher_y", "teacher_scores"})


class Matryoshka(torch.nn.Module):
    """A loss on the first w dimensions of all embeddings, summed over several widths w.

    For embeddings that are truncated to fewer dimensions when they are used.

    Args:
        loss: a loss module of fastsim, or any function of embeddings (N, D) and further arguments
            that returns a scalar, or one number per row as with reduction "none". Every
            floating-point argument of two to four dimensions, positional or by name, counts as
            embeddings, except `targets`, `teacher_x`, `teacher_y` and `teacher_scores`.
        widths: distinct positive ints.
        weights: the factors c_w, as many numbers or tensors of one; None: all 1.

    Raises:
        ValueError, TypeError: for arguments that do not fit.

    Example:
        >>> loss = fastsim.losses.Matryoshka(fastsim.losses.InfoNCE(temperature=1.0), widths=[2, 1])
        >>> loss(torch.eye(2), torch.eye(2))  # width 2 gives 0.3133, width 1 0.5032
        tensor(0.8165)
    """

    def __init__(
        self,
        loss: torch.nn.Module,
        widths: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not callable(loss):
            raise TypeError(f"loss: wanted a loss module or a function, got {loss!r:.60}")
        widths = _several("widths", widths)
        for place, width in enumerate(widths):
            check_count(f"widths[{place}]", width)
        if not widths or len(set(widths)) < len(widths):
            raise ValueError(f"widths: wanted at least one, all different, got {widths}")
        weights = (1.0,) * len(widths) if weights is None else _several("weights", weights)
        if len(weights) != len(widths):
            raise ValueError(f"weights: wanted {len(widths)}, one per width, got {len(weights)}")
        for place, weight in enumerate(weights):
            check_number(f"weights[{place}]", weight)
        self.loss, self.widths, self.weights = loss, widths, weights
        names = inspect.signature(loss.function).parameters if isinstance(loss, LossModule) else ()
        own = isinstance(loss, LossModule) and type(loss).forward is LossModule.forward
        numbers = not any(isinstance(weight, Tensor) for weight in weights)
        self._may_be_swept = own and numbers and len(widths) > 1
        places = {place for place, name in enumerate(names) if name in _UNCUT}
        self._uncut = places | _UNCUT

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """Computes the weighted sum over the widths of the loss, in the shape of the loss."""
        by_place = {**dict(enumerate(arguments)), **options}
        embeddings = {
            place: value
            for place, value in by_place.items()
            if place not in self._uncut
            and isinstance(value, torch.Tensor)
            and value.dim() in (2, 3, 4)
            and value.dtype in FLOATING
        }
        if not embeddings:
            raise TypeError("arguments: wanted embeddings (N, D), got none")
        full = min(value.shape[-1] for value in embeddings.values())
        if max(self.widths) > full:
            raise ValueError(f"widths: wanted at most {full}, got {max(self.widths)}")

        def loss_of(width):
            # One tensor on both sides stays one tensor.
            cut = {id(value): value[..., :width] for value in embeddings.values()}
            values = by_place | {place: cut[id(value)] for place, value in embeddings.items()}
            named = {name: values[name] for name in options}
            return self.loss(*(values[i] for i in range(len(arguments))), **named)

        widest, losses = max(self.widths), {}
        if self._may_be_swept:
            with sum_over(self.widths, self.weights) as sweep:
                losses[widest] = loss_of(widest)
            if sweep.served:
                return losses[widest]
        terms = [losses[width] if width in losses else loss_of(width) for width in self.widths]
        if any(type(weight) not in (int, float) or weight != 1 for weight in self.weights):
            terms = [
                learnt_number(weight) * term
                for weight, term in zip(self.weights, terms, strict=True)
            ]
        return torch.stack(terms).sum(0)

    def extra_repr(self):
        return f"widths={self.widths}, weights={self.weights}"


def _several(name, values):
    """A sequence as a tuple."""
    try:
        return tuple(values)
    except TypeError:
        kind = type(values).__name__
        raise TypeError(f"{name}: wanted a sequence of numbers, got {kind}") from None
