"""Fixtures shared by the tests."""

import gc
import os
from pathlib import Path

import pytest
import torch

import fastsim
from fastsim.backends.cpu import sizes
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.torch import panels
from fastsim.backends.torch.backend import TorchBackend
from fastsim.engine import prepared
from tests.seeds import SEED

pytest_plugins = ["tests.collection"]


def pytest_configure():
    """Processes of `pytest -n` share the cores, and so do the processes that they start."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if processes > 1:
        threads = max(1, os.cpu_count() // processes)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def pytest_collection_finish():
    """What is there by now stays: garbage collection, which accelerate asks for at the end of every
    training run, need not look at all of it again.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """So that what is collected at the end can be: some libraries count what they leave."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded():
    """A failure says how to have the same inputs again."""
    torch.manual_seed(SEED)
    print(f"FASTSIM_SEED={SEED}")  # shown for a test that fails


@pytest.fixture(autouse=True)
def forgotten():
    """No shortcut of another test passes by what a test replaces."""
    prepared.forget()


@pytest.fixture
def precision():
    """A function that sets the precision of float32 products until the end of the test."""
    kept = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(kept)


@pytest.fixture
def small_panels(monkeypatch):
    """The engines with panels of a few rows and columns, so that small inputs need many."""
    monkeypatch.setattr(panels, "CPU_PANEL", 4 << 9)
    monkeypatch.setattr(panels, "FEWEST_ROWS", 8)
    monkeypatch.setattr(sizes, "PANEL", 1 << 9)
    monkeypatch.setattr(sizes, "BAND", 1 << 9)
    monkeypatch.setattr(sizes, "FEWEST_ROWS", 12)
    monkeypatch.setattr(sizes, "WIDEST", 64)


@pytest.fixture
def in_passes(monkeypatch):
    """The engine without the one call for small batches."""
    monkeypatch.setattr(CpuBackend, "serves_one_call", lambda *_: False)
    monkeypatch.setattr(TorchBackend, "serves_one_call", lambda *_: False)
    monkeypatch.setattr(CpuBackend, "serves_hardest_pairs", lambda *_: False)


@pytest.fixture(scope="session")
def data():
    """The folder of real data, or a skip with the reason."""
    folder = Path(os.environ.get("FASTSIM_DATA", Path(__file__).parents[2] / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"real data: no folder {folder}; set FASTSIM_DATA")
    return folder


@pytest.fixture
def usable():
    """A function that skips the test with the backend's own reason unless it is usable here."""

    def check(backend):
        reason = fastsim.backends()[backend]
        if reason is not None:
            pytest.skip(f"{backend}: {reason}")

    return check
