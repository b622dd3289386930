"""Tests of the Triton kernels under its interpreter, on CPU tensors.

Triton decides at import whether it interprets, so tests/test_triton.py runs this folder in a
process of its own with TRITON_INTERPRET=1; elsewhere nothing here is collected.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def whole_slices():
    """Reductions by a function of our own take whole slices, in the same order.

    The interpreter takes one number after the other, which is most of a test's time.
    """
    from triton.runtime.interpreter import ReduceOps

    def reduced(self, values):
        (value,) = values
        data, axis = value.handle.data, self.axis
        found = self.to_tensor(data.take(0, axis), value.dtype)
        for place in range(1, data.shape[axis]):
            found = self.combine_fn.fn(found, self.to_tensor(data.take(place, axis), value.dtype))
        return [found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceOps, "generic_reduce", reduced)
        yield
