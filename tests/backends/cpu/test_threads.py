"""Every loss has the same bits whatever threads share it, and whichever is held up."""

import pytest
import torch

import fastsim
from fastsim.backends.cpu import blas
from tests.cases import CASES, call, inputs, takes_backend
from tests.seeds import fresh
from tests.threads import assert_same_bits

# More than one thread's worth, for torch's own operations too: 32,768 numbers of rows x width. No
# multiple of a tile.
SHAPE = 261, 266, 130
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


@pytest.mark.parametrize(
    ("loss", "few", "options"),
    [
        (fastsim.full_triplet, "exclude", {}),
        (fastsim.info_nce, "positives", {"directions": ("query_to_doc", "doc_to_query")}),
    ],
    ids=("full_triplet", "info_nce"),
)
def test_a_gradient_of_many_rows_is_added_up_in_one_order(loss, few, options, usable):
    usable("cpu")
    generator = fresh(92)
    count, width = 600, 257
    x, y = (torch.randn(count, width, generator=generator) for _ in range(2))
    rows, columns = torch.randint(0, count // 6, (2, count), generator=generator)
    options = options | {few: (rows, columns) if few == "exclude" else rows}

    def results():
        sides = [side.clone().requires_grad_() for side in (x, y)]
        value = loss(*sides, **options, backend="cpu")
        return [value.detach(), *torch.autograd.grad(value, sides)]

    assert_same_bits(results, (1, 2, 7))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_the_gradient_of_the_temperature_is_added_up_in_one_order(similarity, usable):
    """In one call, where it is a sum over the rows of one side."""
    usable("cpu")
    generator = fresh(93)
    x, y = (torch.randn(600, 257, generator=generator) for _ in range(2))

    def results():
        given = [value.clone().requires_grad_() for value in (x, y, torch.tensor(0.3))]
        options = {"temperature": given[2], "similarity": similarity, "backend": "cpu"}
        value = fastsim.info_nce(*given[:2], **options)
        return [value.detach(), *torch.autograd.grad(value, given)]

    assert_same_bits(results, (1, 2, 7))
