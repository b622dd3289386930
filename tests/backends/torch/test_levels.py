"""CoSENT over a matrix with more levels than are looked at one by one: scattered, band by band."""

import pytest
import torch

import fastsim
from fastsim.backends import bands
from fastsim.backends.torch import compiled
from fastsim.backends.torch.epilogues import FEW, levels
from tests.seeds import fresh

N, M, D = 23, 31, 6


@pytest.fixture(params=["bins of the matrix", "bins of each row"])
def scattered(request, monkeypatch):
    monkeypatch.setattr(levels, "_contend", lambda device: request.param == "bins of each row")
    monkeypatch.setenv(compiled.VARIABLE, "0")


def loss_and_gradients(backend, dtype, targets, seed):
    generator = fresh(seed)
    sides = [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M)]
    leaves = [side.to(dtype).requires_grad_() for side in sides]
    loss = fastsim.cosent_matrix(*leaves, targets, scale=5.0, backend=backend)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("numbers", [1, 3 * M, 1 << 20])
@pytest.mark.parametrize("count", [FEW + 1, 200])
def test_as_the_formula(count, numbers, scattered, monkeypatch):
    """Whatever the bands; 200 levels are more than a row has scores."""
    monkeypatch.setattr(bands, "numbers_of_a_band", lambda *_: numbers)
    targets = torch.randint(0, count, (N, M)).double()
    found = loss_and_gradients("torch", torch.float64, targets, 3)
    wanted = loss_and_gradients("eager", torch.float64, targets, 3)
    torch.testing.assert_close(found, wanted)
    again = loss_and_gradients("torch", torch.float64, targets, 3)
    assert all(map(torch.equal, found, again))


def test_a_nan_reaches_the_loss(scattered):
    targets = torch.arange(N * M).view(N, M).remainder(FEW + 2).float()
    x = torch.randn(N, D)
    x[2, 1] = torch.nan
    assert fastsim.cosent_matrix(x, torch.randn(M, D), targets, backend="torch").isnan()


def test_each_pair_once(scattered):
    targets = torch.arange(N * N).view(N, N).remainder(FEW + 2).double()
    x = torch.randn(N, D, dtype=torch.float64)
    targets = targets + targets.T
    found, wanted = (fastsim.cosent_matrix(x, None, targets, backend=b) for b in ("torch", "eager"))
    torch.testing.assert_close(found, wanted)


def test_bins_fit_a_band(monkeypatch):
    """Of few columns and many levels there are more bins than scores in a row."""
    made, of_band = [], levels._of_band

    def noted(tile, index, sides):
        made.append(index.shape[0] * max(index.shape[1], len(tile.levels)))
        return of_band(tile, index, sides)

    monkeypatch.setattr(levels, "_of_band", noted)
    monkeypatch.setattr(bands, "numbers_of_a_band", lambda *_: 1000)
    targets = torch.arange(N * 3).view(N, 3).remainder(50).float()
    fastsim.cosent_matrix(torch.randn(N, D), torch.randn(3, D), targets, backend="torch")
    assert len(made) > 1
    assert max(made) <= 1000
