"""Every loss has the same bits whatever threads share it, and whichever is held up.

More threads than cores take turns: those that wait have their work taken over by others.
"""

import contextlib

import pytest
import torch

from fastsim.backends.cpu import blas
from tests.cases import CASES, call, inputs, takes_backend

COUNTS = (1, 2, 3, 7)
ROWS, WIDTH = 389, 66  # more than one thread's worth; no multiple of a tile
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def results(case, shape, dtype, count):
    tensors, others, options = inputs(case, shape, dtype, 91)
    with threads(count):
        value, grads = call(case.loss, tensors, others, options | {"backend": "cpu"})
    return [value, *grads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*filter(takes_backend, CASES)], ids=repr)
def test_any_number_of_threads_gives_the_same_bits(case, dtype, usable):
    usable("cpu")
    if blas.IN_USE and dtype != torch.float64:
        pytest.skip("float32 products are those of a BLAS library, which sums as it does")
    # The formula that names a loss of few scores may be slow for many: theirs are fewer.
    rows = min(ROWS, case.largest)
    shape = rows, rows + 5, WIDTH
    alone, *shared = (results(case, shape, dtype, count) for count in COUNTS)
    for count, found in zip(COUNTS[1:], shared, strict=True):
        assert all(map(torch.equal, alone, found)), f"{count} threads"
