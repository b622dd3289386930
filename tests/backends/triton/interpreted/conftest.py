"""Tests of the Triton kernels under its interpreter, on CPU tensors.

Triton decides at import whether it interprets, so tests/test_triton.py runs this folder in a
process of its own with TRITON_INTERPRET=1; elsewhere nothing here is collected.
"""

import os

import pytest

from tests.backends.triton.interpreter import quicken

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch.setattr)
        yield
