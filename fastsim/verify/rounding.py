"""How far the outputs of a problem move when its rows are rounded as a kernel rounds them.

A learnt number's gradient, or the mean of many losses, is a small sum of large terms. The torch
backend's error there is one chance draw, which may be far below what the rounding of the terms
amounts to.
"""

import math
from dataclasses import replace

import torch

DRAWS = 8
SPREAD = 4  # root mean squares: hardly any sum of many roundings is off by more


def moves(problem, outputs, truth, dtype, device):
    """Of each output the root mean square, over several draws, of its entries' largest change.

    outputs: (problem, backend, device, dtype) -> tensors; truth: those of the problem in float64.
    """
    size = relative(dtype, problem.leaves[0].shape[1])
    squares = [0.0] * len(truth)
    for draw in range(DRAWS):
        changed = outputs(_rounded(problem, size, draw), problem.exact, device, torch.float64)
        for place, (one, right) in enumerate(zip(changed, truth, strict=True)):
            squares[place] += (one - right).abs().max().item() ** 2
    return [math.sqrt(square / DRAWS) for square in squares]


def relative(dtype, width):
    """By how much of itself a number of rows of that width may be off.

    Operands of 16-bit inputs are float16, those of TF32 have as many digits. Products of float32
    numbers are sums of as many terms as the rows are wide, whose roundings grow with the root of
    the number of terms (Higham and Mary, 2019, A new approach to probabilistic rounding error
    analysis).
    """
    if dtype.itemsize == 2 or torch.get_float32_matmul_precision() != "highest":
        return torch.finfo(torch.float16).eps / 2
    return math.sqrt(width) * torch.finfo(torch.float32).eps / 2


def _rounded(problem, size, draw):
    """The problem with each number of its rows, and of a guide's, off by that much of itself.

    Up or down by the number itself, so that equal rows stay equal.
    """
    like = problem.leaves[0]

    def near(value):
        if isinstance(value, tuple):
            return tuple(map(near, value))
        rows = isinstance(value, torch.Tensor) and value.ndim == 2
        if not rows or value.dtype != like.dtype or value.shape[1] != like.shape[1]:
            return value
        value = value.double()
        place = torch.arange(value.shape[1], device=value.device)
        return value * (1 + size * torch.sin(1e4 * (draw + 1) * value + place).sign())

    leaves = [near(leaf.detach()) for leaf in problem.leaves]
    options = {name: near(value) for name, value in problem.options.items()}
    return replace(problem, leaves=leaves, given=near(tuple(problem.given)), options=options)
