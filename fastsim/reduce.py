"""Shared by all losses: the reduction over rows, the precision of scores and temperatures."""

import torch

from fastsim.precision import compute_dtype


def reduce(losses, reduction, count=None):
    """Losses (N,) -> their mean (), their sum () or the losses.

    count: an integer tensor (), the number that the mean divides by; None: N.
    """
    if reduction == "none":
        return losses
    if reduction == "mean" and count is None:
        return losses.mean()
    total = losses.sum()
    return total / count.clamp(min=1) if reduction == "mean" else total


def factor_of_sum(reduction, rows):
    """The number that turns the sum of `rows` losses into the reduction; None for "none"."""
    if reduction == "none":
        return None
    return 1 / rows if reduction == "mean" else 1.0


def equal_row_weights(reduction, rows, dtype, device):
    """The weights (N,) that make sum_i weights_i loss_i the reduction; None for "none"."""
    factor = factor_of_sum(reduction, rows)
    return None if factor is None else torch.full((rows,), factor, dtype=dtype, device=device)


def as_float(scores):
    """Scores in the compute type: 16-bit scores become float32."""
    return scores.to(compute_dtype(scores))


def softplus(x):
    """log(1 + exp(x)), exact in float64 too: from x = 20 on torch returns x, an error of 2e-9."""
    return torch.nn.functional.softplus(x, threshold=50.0)


def inverse(temperature, x):
    """1 / temperature, of a tensor in the compute type of x: in 16 bits all logits would be off."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(compute_dtype(x))
    return 1 / temperature


def over_temperature(scores, temperature):
    """The logits scores / temperature, -inf where the score is -inf.

    A score of -inf is divided as 0. Otherwise -inf times its weight 0 would make the gradient of a
    learnt temperature NaN.
    """
    if not isinstance(temperature, torch.Tensor):
        return scores / temperature
    left_out = scores == -torch.inf
    return (scores.masked_fill(left_out, 0.0) / temperature).masked_fill(left_out, -torch.inf)


def below_every_score(scores):
    """A value below every score; it is finite, so that gradients are finite too."""
    return torch.finfo(scores.dtype).min
