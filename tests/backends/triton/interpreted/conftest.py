"""Tests of the Triton kernels under its interpreter, on CPU tensors.

Triton decides at import whether it interprets, so tests/backends/triton/test_compiles.py runs
this folder in a process of its own with TRITON_INTERPRET=1; elsewhere nothing here is collected.
"""

import os

import pytest

from fastsim.backends.triton.small_batch import SmallBatch
from tests.backends.triton.interpreter import adjust

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def adjusted_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        adjust(patch.setattr)
        yield


@pytest.fixture
def in_panels(monkeypatch):
    """The passes over panels, where a small batch has kernels of its own."""
    monkeypatch.setattr(SmallBatch, "serves_one_call", lambda *_: False)


@pytest.fixture(params=["small batch", "panels"])
def either_way(request):
    """A small batch by its own kernels, and by the passes over panels."""
    if request.param == "panels":
        request.getfixturevalue("in_panels")
