"""What the tests of verification share."""

import pytest

import fastsim
from fastsim.verify import verdicts
from tests.verify import fakes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered of another."""
    monkeypatch.setenv("FASTSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    monkeypatch.setattr(verdicts, "_warned", set())
    monkeypatch.setattr(verdicts, "_unwritten", {})
    return tmp_path


@pytest.fixture
def two_kernels(monkeypatch):
    """Two backends that serve meta tensors, as triton and cuda serve a GPU's."""
    known = dict(fastsim.backends.__globals__["_BACKENDS"])
    known |= {"fake": fakes.Fake(), "lying": fakes.Lying()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
