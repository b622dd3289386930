"""Panels whose products are made by the BLAS library of torch, as on Apple's processors."""

import os
import subprocess
import sys

import pytest
import torch

from fastsim.backends import get
from fastsim.backends.cpu import amx, blas, further, one_call, sizes
from fastsim.backends.cpu.lazy_rows import BAND, LazyUnitRows
from tests.cases import BY_NAME, CASES
from tests.losses.test_losses import compare, names
from tests.seeds import fresh

FLOAT32 = torch.finfo(torch.float32).eps
OFF, ON = "0", "1"


@pytest.fixture
def products(monkeypatch, usable):
    """The library makes all products: how many so far."""
    usable("cpu")
    made, product = [], blas._product
    monkeypatch.setattr(amx, "parts", lambda dtype: 0)
    monkeypatch.setattr(blas, "IN_USE", True)
    monkeypatch.setattr(one_call, "SMALL", 0)
    monkeypatch.setattr(sizes, "CHEAP", 0)
    monkeypatch.setattr(further, "FEW", 0)
    monkeypatch.setattr(blas, "_product", lambda *given: (made.append(1), product(*given)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=names)
@pytest.mark.parametrize("case", [c for c in CASES if c.tile], ids=names)
def test_losses(case, dtype, products):
    shape = (31, 37, 19) if case.largest == BY_NAME["info_nce"].largest else (9, 11, 19)
    compare(case, "cpu", dtype, shape, seed=29)
    assert products


def test_float64_is_left_to_the_kernels(products):
    compare(BY_NAME["info_nce"], "cpu", torch.float64, (31, 37, 19), seed=29)
    assert not products


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("made", [False, True], ids=["unit rows", "unit rows of a guide"])
def test_scores(made, add, products):
    """Of columns in the middle; of a guide in more than one part."""
    random = fresh(5)
    x, y = (torch.randn(n, 33, generator=random) for n in (29, BAND + 90))
    first, rows = 17, LazyUnitRows(x)[:]
    columns = LazyUnitRows(y) if made else LazyUnitRows(y)[:]
    panel = torch.randn(29, BAND + 40, generator=random)[:, : BAND + 31]
    kept = panel.double() if add else torch.zeros(29, BAND + 31)
    blas.scores(rows, columns, first, panel, add)
    exact = rows.double() @ LazyUnitRows(y)[first : first + BAND + 31].double().T + kept
    # 33 roundings of sums no larger than 1, and one of what they are added to.
    assert (panel - exact).abs().max() <= 34 * FLOAT32 * (1 + kept.abs().max())
    assert len(products) == (2 if made else 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_multiply(transposed, products):
    random = fresh(6)
    panel = torch.randn(23, 45, generator=random)[:, :41]
    left = panel.t() if transposed else panel
    right = torch.randn(left.shape[1], 17, generator=random)
    out = torch.full((left.shape[0], 17), torch.nan)
    get("cpu").multiply(left, right, out, accumulate=False)
    get("cpu").multiply(left, right, out, accumulate=True)
    size = (left.double().abs() @ right.double().abs()).max()
    allowed = (left.shape[1] + 1) * FLOAT32 * 2 * size
    assert (out - 2 * left.double() @ right.double()).abs().max() <= allowed
    assert len(products) == 2


def test_autocast_has_no_say(products):
    x, y = (torch.randn(n, 33, generator=fresh(7)) for n in (29, 31))
    before, under = torch.empty(2, 29, 31)
    blas.scores(x, y, 0, before, False)
    with torch.autocast("cpu", torch.bfloat16):
        blas.scores(x, y, 0, under, False)
        assert torch.mm(x, y.T).dtype == torch.bfloat16
    assert torch.equal(before, under)


@pytest.mark.parametrize(
    ("wish", "system", "machine", "wanted"),
    [
        ("", "Darwin", "arm64", True),
        (OFF, "Darwin", "arm64", False),
        ("", "Darwin", "x86_64", False),
        ("", "Linux", "aarch64", False),
        (ON, "Linux", "x86_64", True),
    ],
)
def test_the_platform_and_a_variable_decide(wish, system, machine, wanted):
    assert blas.wanted(wish, system, machine) == wanted


def test_the_variable_is_checked_and_info_tells(usable):
    usable("cpu")

    def note(wish):
        report = "from fastsim.backends import get; print(get('cpu').note())"
        environment = os.environ | {blas.VARIABLE: wish}
        return subprocess.run(
            [sys.executable, "-c", report], env=environment, capture_output=True, text=True
        )

    assert "panels by BLAS" in note(ON).stdout
    assert "BLAS" not in note(OFF).stdout
    assert "FASTSIM_BLAS: wanted 0 or 1, got yes" in note("yes").stderr
