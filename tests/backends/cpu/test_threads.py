"""Every loss has the same bits whatever threads share it, and whichever is held up."""

import pytest
import torch

from fastsim.backends.cpu import blas
from tests.cases import CASES, call, inputs, takes_backend
from tests.threads import assert_same_bits

SHAPE = 389, 394, 66  # more than one thread's worth; no multiple of a tile
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*filter(takes_backend, CASES)], ids=repr)
def test_any_number_of_threads_gives_the_same_bits(case, dtype, usable):
    usable("cpu")
    if blas.IN_USE and dtype != torch.float64:
        pytest.skip("float32 products are those of a BLAS library, which sums as it does")
    tensors, others, options = inputs(case, SHAPE, dtype, 91)

    def results():
        value, grads = call(case.loss, tensors, others, options | {"backend": "cpu"})
        return [value, *grads]

    assert_same_bits(results, (1, 2, 3, 7))
