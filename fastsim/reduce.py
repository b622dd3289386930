"""Reduction of row losses and the precision of scores and temperatures, alike for every loss."""

import torch


def reduce(losses, reduction, count=None):
    """(N,) losses -> their mean, their sum, or themselves.

    count: an integer (), how many the mean is over; None: the losses.
    """
    if reduction == "none":
        return losses
    if reduction == "mean" and count is None:
        return losses.mean()
    total = losses.sum()
    return total / count.clamp(min=1) if reduction == "mean" else total


def factor_of_sum(reduction, rows):
    """The number by which the sum of `rows` losses is the reduction; None for "none"."""
    if reduction == "none":
        return None
    return 1 / rows if reduction == "mean" else 1.0


def equal_row_weights(reduction, rows, dtype, device):
    """The weights (N,) that make sum_i weights_i loss_i the reduction; None for "none"."""
    factor = factor_of_sum(reduction, rows)
    return None if factor is None else torch.full((rows,), factor, dtype=dtype, device=device)


def as_float(scores):
    """16-bit scores as float32; losses never work in less."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def softplus(x):
    """log(1 + exp(x)), in float64 too: from 20 on torch's is x, which is off by 2e-9."""
    return torch.nn.functional.softplus(x, threshold=50.0)


def inverse(temperature, x):
    """1 / temperature, of a tensor in the compute type of x: rounding it would move every logit."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(torch.promote_types(x.dtype, torch.float32))
    return 1 / temperature


def over_temperature(scores, temperature):
    """The logits scores / temperature, -inf where a score is.

    What takes no part is divided as 0 is: -inf times its weight of 0 would make NaN of the gradient
    of a learnt temperature.
    """
    if not isinstance(temperature, torch.Tensor):
        return scores / temperature
    left_out = scores == -torch.inf
    return (scores.masked_fill(left_out, 0.0) / temperature).masked_fill(left_out, -torch.inf)


def below_every_score(scores):
    """A value below every score, finite so that gradients stay so."""
    return torch.finfo(scores.dtype).min
