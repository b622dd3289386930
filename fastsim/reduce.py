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


def row_weights(reduction, rows, dtype, device):
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
    """1 / temperature, of a tensor in the compute type of x: rounding it would move every logit.

    ValueError for a number so small that the type cannot hold its inverse.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(temperature, torch.Tensor):
        return 1 / temperature.to(dtype)
    scale = 1 / temperature
    if abs(scale) > torch.finfo(dtype).max:
        raise ValueError(
            f"temperature: wanted a number whose inverse {dtype} can hold, got {temperature}"
        )
    return scale


def below_every_score(scores):
    """A value below every score, finite so that gradients stay so."""
    return torch.finfo(scores.dtype).min
