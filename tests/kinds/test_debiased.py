"""Rows whose debiased loss is not that of most: at its least, of no prior, without a negative."""

import math

import pytest
import torch

import fastsim
from tests import oracles
from tests.cases import call

BACKENDS = tuple(fastsim.backends())
PRIORS = torch.tensor([0.1, 0.6, 0.3, 0.0, 0.6], dtype=torch.float64)
# The columns have the id of row 2, which is left with its positive alone.
IDS = torch.arange(5), torch.full((8,), 2)


def problem():
    """Anchors, and candidates of which those of rows 1 and 4 are near; the negatives of row 4 are
    not, so that in both rows few of them are left by the prior.
    """
    x, y = (torch.randn(rows, 6, dtype=torch.float64) for rows in (5, 8))
    y[1], y[4] = x[1] + 0.1 * y[1], x[4] + 0.1 * y[4]
    return x, y


def results(loss, x, y, **options):
    """(losses, their gradients by the embeddings and by the temperature)."""
    leaves = [side.clone().requires_grad_() for side in (x, y)]
    temperature = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    losses = loss(*leaves, temperature=temperature, **options)
    weights = torch.arange(1.0, 6, dtype=torch.float64)
    return losses, *torch.autograd.grad(losses @ weights, (*leaves, temperature))


@pytest.mark.parametrize("beta", [0.0, 1.5])
@pytest.mark.parametrize("prior", [0.0, 0.6, PRIORS], ids=["none", "one", "each"])
@pytest.mark.parametrize("way", ["in one call", "in passes"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(backend, way, prior, beta, request, usable):
    usable(backend)
    if way == "in passes":
        request.getfixturevalue("in_passes")
    x, y = problem()
    options = {"tau_plus": prior, "beta": beta, "exclude": IDS}
    more = {"reduction": "none", "backend": backend}
    found = results(fastsim.debiased_contrastive, x, y, **options, **more)
    torch.testing.assert_close(found, results(oracles.debiased_contrastive, x, y, **options))
    assert found[0][2] == 0


def test_rows_are_at_their_least():
    """Where the prior takes more from the sum of the negatives than it has."""
    x, y = problem()
    cosines = oracles.cosines(x, y) / 0.4
    for row in (1, 4):
        mean = torch.cat([cosines[row, :row], cosines[row, row + 1 :]]).exp().mean()
        assert mean < 0.6 * cosines[row, row].exp()


@pytest.mark.parametrize("temperature", [0.02, 0.001])
@pytest.mark.parametrize("prior", [0.0, 0.1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_near_zero_keeps_its_digits(backend, prior, temperature, in_passes, usable):
    """Cosines of 1 and of 0 without rounding: log(1 + K e^-z_p), at the least K e^-2z_p."""
    usable(backend)
    x, scale = torch.eye(4, dtype=torch.float64), 1 / temperature
    options = {"temperature": temperature, "tau_plus": prior, "reduction": "none"}
    losses = fastsim.debiased_contrastive(x, x, **options, backend=backend)
    wanted = 3 * torch.tensor(-scale * (2 if prior else 1), dtype=torch.float64).exp()
    # What the exponent rounds, and a rounding for each operation on it.
    rounding = torch.finfo(torch.float64).eps * (4 * scale + 8)
    torch.testing.assert_close(losses, wanted.expand(4), rtol=rounding, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_just_above_its_least(backend, in_passes, usable):
    """The mean of its negatives exceeds what the prior takes by more than the share 1 - prior of
    the least, and by less than the least.
    """
    usable(backend)
    temperature, prior, least = 0.4, 0.6, math.exp(-1 / 0.4)
    cosine = temperature * math.log(prior + (1 - prior / 2) * least)
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[0.0, 1.0]] + 3 * [[cosine, math.sqrt(1 - cosine**2)]], dtype=torch.float64)
    options = {"temperature": temperature, "tau_plus": prior}
    more = {"reduction": "none", "backend": backend}
    found = call(fastsim.debiased_contrastive, [x, y], [], options | more)
    torch.testing.assert_close(found, call(oracles.debiased_contrastive, [x, y], [], options))
