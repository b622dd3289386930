"""The parts of an encoder after its transformer: pooling, dense layer, normalisation."""

import torch
from torch import nn

from fastsim.checks import check_choice, check_flags, int_of
from fastsim.encoders.names import POOLINGS
from fastsim.precision import compute_dtype

# The activations of torch.nn that need no arguments, have no weights and keep the shape.
ACTIVATIONS = (
    *("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity"),
    *("LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU"),
    *("Sigmoid", "Softmax", "Softmin", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink"),
)


def pool(states, mask, pooling="mean", *, tokens=None):
    """One vector (N, D) per row of token states (N, T, D), without padding.

    mask (N, T): 1 at the tokens to pool; padding may be on either side. pooling: one of `POOLINGS`;
    "weighted_mean" weights the i-th token by i. tokens (N, T): the mask by which i is counted; it
    may include tokens that are not pooled, such as a prompt's. None: the mask. The result is
    float32 for 16-bit states (a mean of many tokens needs more precision), else it has the dtype of
    the states. A row without tokens gives 0. TypeError, ValueError for arguments that do not fit.
    """
    check_choice("pooling", pooling, tuple(POOLINGS))
    tokens = mask if tokens is None else tokens
    for name, value in (("states", states), ("mask", mask), ("tokens", tokens)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: wanted a torch.Tensor, got {type(value).__name__}")
    if states.dim() != 3:
        raise ValueError(f"states: wanted 3 dimension(s), got shape {tuple(states.shape)}")
    shape = tuple(states.shape[:2])
    for name, value in (("mask", mask), ("tokens", tokens)):
        if value.shape != shape:
            raise ValueError(
                f"{name}: wanted shape {shape} as the states, got {tuple(value.shape)}"
            )
    states = states.to(compute_dtype(states))
    if pooling in ("cls", "last"):
        steps = torch.arange(mask.shape[1], device=mask.device)
        real = mask.bool()
        if pooling == "cls":
            place = steps.masked_fill(~real, mask.shape[1]).amin(1).clamp(max=mask.shape[1] - 1)
        else:
            place = steps.masked_fill(~real, -1).amax(1).clamp(min=0)
        picked = states.gather(1, place[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        return picked.masked_fill(~real.any(1, keepdim=True), 0.0)
    if pooling == "max":
        top = states.masked_fill(~mask.bool()[:, :, None], -torch.inf).amax(1)
        return top.masked_fill(~mask.bool().any(1, keepdim=True), 0.0)
    weights = mask.to(states.dtype)
    if pooling == "weighted_mean":
        weights = weights * tokens.to(states.dtype).cumsum(1)
    total = (states * weights[:, :, None]).sum(1)
    return total / weights.sum(1, keepdim=True).clamp(min=1e-9)


class Dense(nn.Module):
    """activation(W x + b), in sentence-transformers' layout: (N, in_features) -> (N, out_features).

    activation: one of `ACTIVATIONS`, the names of torch.nn. TypeError, ValueError for arguments
    that do not fit.
    """

    def __init__(self, in_features, out_features, *, bias=True, activation="Tanh"):
        super().__init__()
        in_features = int_of("in_features", in_features, 1)
        out_features = int_of("out_features", out_features, 1)
        check_flags(bias=bias)
        check_choice("activation", activation, ACTIVATIONS)
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = getattr(nn, activation)()

    def forward(self, x):
        # The pooled rows are float32 even if the weights have 16 bits.
        return self.activation(self.linear(x.to(self.linear.weight.dtype)))


def width_after(head, width):
    """The width of rows after the modules of a head; width: that before them."""
    return [width, *(part.linear.out_features for part in head if isinstance(part, Dense))][-1]


def check_widths(head, width):
    """ValueError unless each `Dense` of a head takes the width of the part before it."""
    for place, part in enumerate(head):
        before = width_after(head[:place], width)
        if isinstance(part, Dense) and part.linear.in_features != before:
            raise ValueError(
                f"head[{place}]: wanted {before} in_features, the width before it,"
                f" got {part.linear.in_features}"
            )


class Normalize(nn.Module):
    """Divides rows (N, D) by their norms, as sentence-transformers' module of this name."""

    def forward(self, x):
        return nn.functional.normalize(x, dim=1)
