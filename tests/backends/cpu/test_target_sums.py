"""Label smoothing gives a row one large target and many small ones, all alike: the sum of these."""

import pytest
import torch
from torch import nn

import fastsim
from tests.backends.cpu.instruction_sets import SETS, said
from tests.seeds import fresh

ROWS, WIDTH, TEMPERATURE, SMOOTHING = 1100, 384, 0.05, 0.1


def ours(x, y):
    options = {"temperature": TEMPERATURE, "label_smoothing": SMOOTHING}
    return fastsim.info_nce(x, y, **options, backend="cpu")


def theirs(x, y):
    x, y = (nn.functional.normalize(side) for side in (x, y))
    logits, targets = x @ y.T / TEMPERATURE, torch.arange(len(x))
    return nn.functional.cross_entropy(logits, targets, label_smoothing=SMOOTHING)


def gradient(loss, sides):
    sides = [side.clone().requires_grad_() for side in sides]
    return torch.cat(torch.autograd.grad(loss(*sides), sides)).double()


def errors():
    """The error of our float32 gradient, and that of torch's, as shares of the gradient's size."""
    random = fresh(83)
    sides = [torch.randn(ROWS, WIDTH, generator=random) for _ in range(2)]
    truth = gradient(theirs, [side.double() for side in sides])
    found = (gradient(loss, sides) for loss in (ours, theirs))
    return [float((gradients - truth).norm() / truth.norm()) for gradients in found]


@pytest.mark.parametrize("instructions", SETS)
def test_many_targets_alike_do_not_move_the_gradient(instructions, usable):
    """Each lane of few takes more of them."""
    usable("cpu")
    found = said(f"from {__name__} import errors; print(*errors())", instructions)
    error, dense = map(float, found.split()[-2:])
    assert 0 < error <= 2 * dense
