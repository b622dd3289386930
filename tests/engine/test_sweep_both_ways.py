"""The symmetric softmax of a sweep over prefixes, by one exponential of each score."""

import pytest
import torch

import fastsim
from fastsim.backends.cpu import amx, sizes
from fastsim.backends.cpu.sweep import CpuSweep
from tests.cases import call
from tests.engine.test_sweep import (  # noqa: F401
    BACKENDS,
    WIDTHS,
    in_one_sweep,
    large,
    width_by_width,
)
from tests.measure import assert_close, conditioning

_POSITIVES = torch.arange(27) * 40  # in every part


def options_of(backend, options):
    return {"symmetric": True, "backend": backend, **options}


def both_ways(backend, sides, **options):
    """The symmetric loss in a sweep and its gradients."""
    value, grads = call(in_one_sweep(fastsim.info_nce), sides, [], options_of(backend, options))
    return [value, *grads]


def assert_exact(backend, sides, **options):
    """`both_ways` against the definition in float64.

    A logit is a cosine over the temperature, and so is its rounding. Loss and gradients move by at
    most themselves times what their logits move by: that is the size of their terms.
    """

    def dense(sides):
        asked = options_of("eager", options)
        value, grads = call(width_by_width(fastsim.info_nce), sides, [], asked)
        return [value, *grads]

    wide = [side.double() for side in sides]
    moved = conditioning(dense, wide)
    parts = both_ways(backend, sides, **options), dense(wide), dense(sides), moved
    for found, exact, of_dense, move in zip(*parts, strict=True):
        size = exact.abs().max().item() / options["temperature"]
        move *= torch.finfo(torch.float32).eps
        assert_close("value or gradient", found, exact, of_dense, torch.float32, size, move)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.05, 0.02, 0.015, 0.002])
@pytest.mark.parametrize("noise", [1e-3, 0.3, 3.0])
def test_positives_that_outweigh_all_else(noise, temperature, backend, usable):
    """Down to gradients that are nearly nothing, where only exact ones of the positives are."""
    usable(backend)
    x = torch.randn(37, WIDTHS[0])
    sides = [x, x + noise * torch.randn(37, WIDTHS[0])]
    assert_exact(backend, sides, temperature=temperature, margin=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_margin_that_makes_logits_larger(backend, usable):
    """Without it they would be small enough for exponentials relative to 0."""
    usable(backend)
    x = torch.randn(37, WIDTHS[0])
    assert_exact(backend, [x, x + 0.3 * torch.randn(37, WIDTHS[0])], temperature=0.02, margin=-1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.1, 0.002])
def test_parts_of_columns(temperature, backend, usable):
    """More columns than go through all widths at once, those with a row's id excluded."""
    usable(backend)
    sides = [torch.randn(rows, WIDTHS[0]) for rows in (27, 1100)]
    ids = torch.arange(27) % 5, torch.arange(1100) % 7
    assert_exact(backend, sides, temperature=temperature, exclude=ids, positives=_POSITIVES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_candidate(backend, usable):
    """Its probability is 1, its score gradient 0; so it is where all others are excluded.

    The loss is the difference of two equal logits, each of which is rounded in float64.
    """
    usable(backend)
    rounding = torch.finfo(torch.float64).eps / 0.05
    for rows, excluded in ((1, None), (9, (torch.zeros(9, dtype=torch.int64),) * 2)):
        sides = list(torch.randn(2, rows, WIDTHS[0]))
        loss, *grads = both_ways(backend, sides, temperature=0.05, exclude=excluded)
        assert loss.abs() <= rounding
        assert not any(grad.any() for grad in grads)


@pytest.fixture
def no_matrix_unit(monkeypatch):
    """Where there is one, the products of a sweep are made again, not kept."""
    monkeypatch.setattr(amx, "parts", lambda _: 0)


@pytest.mark.usefixtures("no_matrix_unit")
@pytest.mark.parametrize("rows", [0, 12, 26])
def test_some_rows_keep_their_products(rows, small_panels, monkeypatch, usable):
    usable("cpu")
    monkeypatch.setattr(sizes, "KEPT_IN_SWEEP", rows * 26 * len(WIDTHS))
    sides = list(torch.randn(2, 26, WIDTHS[0]))
    assert_exact("cpu", sides, temperature=0.05)


@pytest.mark.usefixtures("no_matrix_unit")
@pytest.mark.parametrize("rows", [0, 12])
def test_products_that_are_kept_are_not_made_again(rows, small_panels, monkeypatch, usable):
    """What is lost of them between the passes shows."""
    usable("cpu")
    coefficients = CpuSweep.coefficients

    def lose(self, *given):
        self.panels.fill_(torch.nan)
        return coefficients(self, *given)

    monkeypatch.setattr(CpuSweep, "coefficients", lose)
    monkeypatch.setattr(sizes, "KEPT_IN_SWEEP", rows * 26 * len(WIDTHS))
    x, y = torch.randn(2, 26, WIDTHS[0]).unbind()
    x.requires_grad_()
    in_one_sweep(fastsim.info_nce)(x, y, symmetric=True, backend="cpu").backward()
    assert x.grad[:rows].isnan().all()
    assert x.grad[rows:].isfinite().all()
