"""The three products of panels, of every number of rows and columns up to beyond two tiles.

At the edges of a matrix a tile has fewer rows and fewer vectors, and a last vector is not full.
"""

import pytest
import torch

from tests.backends.cpu.instruction_sets import SETS, said
from tests.seeds import fresh

ROWS, COLUMNS = range(1, 14), range(1, 131)  # a tile has at most 6 rows and 64 columns
DEPTH, PADDING = 37, 5


@pytest.fixture(autouse=True)
def here(usable):
    usable("cpu")


def numbers(*shape, dtype, seed):
    return torch.randn(shape, generator=fresh(seed), dtype=torch.float64).to(dtype)


def within(rows, columns, dtype):
    """A matrix of NaN within memory of other numbers, and that memory."""
    memory = torch.full((rows + 2, columns + 2 * PADDING), 7.0, dtype=dtype)
    matrix = memory[1:-1, PADDING:-PADDING]
    return matrix.fill_(torch.nan), memory


def beside(matrix, memory):
    """What of the memory is not the matrix."""
    rest = memory.clone()
    rest[1:-1, PADDING : PADDING + matrix.shape[1]] = 7.0
    return rest


def check(got, a, b):
    """Products of a (N, K) and b (K, M), of which each sum rounds K times."""
    a, b = a.double(), b.double()
    bound = a.shape[1] * torch.finfo(got.dtype).eps * (a.abs() @ b.abs())
    assert ((got.double() - a @ b).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_every_size(dtype):
    x, y = (numbers(most, DEPTH, dtype=dtype, seed=most) for most in (ROWS[-1], COLUMNS[-1]))
    for columns in COLUMNS:
        rows = ROWS[columns % len(ROWS)]
        of_x, of_y = x[:rows].clone(), y[:columns].clone()
        panel, memory = within(rows, columns, dtype)
        torch.ops.fastsim_cpu.scores(of_x, of_y, None, panel, False)
        check(panel, of_x, of_y.T)
        first = panel.clone()
        torch.ops.fastsim_cpu.scores(of_x, of_y, None, panel, True)
        assert torch.equal(panel, 2 * first)
        assert (beside(panel, memory) == 7).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_products_of_every_width(dtype, transposed):
    for width in COLUMNS:
        count = ROWS[width % len(ROWS)]
        shape = (DEPTH, count) if transposed else (count, DEPTH)
        panel, memory = within(*shape, dtype)
        panel.copy_(numbers(*shape, dtype=dtype, seed=width))
        right = numbers(DEPTH, width, dtype=dtype, seed=width + 1)
        out = torch.full((count + 1, width), torch.nan, dtype=dtype)
        torch.ops.fastsim_cpu.multiply(panel, right, out[:-1], transposed, False)
        check(out[:-1], panel.T if transposed else panel, right)
        first = out.clone()
        torch.ops.fastsim_cpu.multiply(panel, right, out[:-1], transposed, True)
        assert torch.equal(out[:-1], 2 * first[:-1])
        assert out[-1].isnan().all()
        assert (beside(panel, memory) == 7).all()


NO_ROWS = """
import torch, fastsim
panel, columns = torch.empty(0, 300), torch.randn(300, 8)
torch.ops.fastsim_cpu.scores(torch.empty(0, 8), columns, None, panel, False)
torch.ops.fastsim_cpu.multiply(panel, columns, torch.empty(0, 8), False, False)
print("served")
"""


@pytest.mark.parametrize("instructions", SETS)
def test_no_rows_of_many_columns(instructions):
    """So many that threads share out the columns."""
    assert said(NO_ROWS, instructions) == "served\n"
