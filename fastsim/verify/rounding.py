"""How much the outputs of a problem change when its rows are rounded as a kernel rounds them.

The gradient of a learnt number, or the mean of many losses, may be a small sum of large terms. The
error of the torch backend is a single sample there, which may be far below the typical effect of
rounding the terms.
"""

import math
from dataclasses import replace

import torch

DRAWS = 8
SPREAD = 4  # root mean squares, which the error of a sum of many roundings rarely exceeds


def moves(problem, outputs, truth, dtype, device):
    """For each output, the root mean square over several draws of the largest change of an entry.

    outputs: a function (problem, backend, device, dtype) -> tensors. truth: those in float64.
    """
    size = relative(dtype, problem.leaves[0].shape[1])
    squares = [0.0] * len(truth)
    for draw in range(DRAWS):
        changed = outputs(rounded(problem, size, draw), problem.exact, device, torch.float64)
        for index, (output, exact) in enumerate(zip(changed, truth, strict=True)):
            squares[index] += (output - exact).abs().max().item() ** 2
    return [math.sqrt(square / DRAWS) for square in squares]


def relative(dtype, width):
    """The relative error of an entry of rows of this width.

    The operands of 16-bit inputs are float16, and TF32 has the same number of digits. A product of
    float32 rows is a sum of `width` terms, whose rounding error grows with the square root of
    `width` (Higham and Mary, 2019, A new approach to probabilistic rounding error analysis).
    """
    if dtype.itemsize == 2 or torch.get_float32_matmul_precision() != "highest":
        return torch.finfo(torch.float16).eps / 2
    return math.sqrt(width) * torch.finfo(torch.float32).eps / 2


def rounded(problem, size, draw):
    """The problem with every entry of its rows, and of a guide's, changed by that relative error.

    The sign of a change depends on the entry itself, so that equal rows stay equal.
    """
    like = problem.leaves[0]

    def perturbed(value):
        if isinstance(value, tuple):
            return tuple(map(perturbed, value))
        rows = isinstance(value, torch.Tensor) and value.ndim == 2
        if not rows or value.dtype != like.dtype or value.shape[1] != like.shape[1]:
            return value
        value = value.double()
        place = torch.arange(value.shape[1], device=value.device)
        return value * (1 + size * torch.sin(1e4 * (draw + 1) * value + place).sign())

    leaves = [perturbed(leaf.detach()) for leaf in problem.leaves]
    arguments = perturbed(tuple(problem.arguments))
    options = {name: perturbed(value) for name, value in problem.options.items()}
    return replace(problem, leaves=leaves, arguments=arguments, options=options)
