"""A function of rows, a band at a time: the result and the gradients of all rows at once."""

import pytest
import torch

from fastsim.backends.rows import take_rows
from fastsim.engine import bands
from fastsim.engine.bands import by_bands
from tests.seeds import fresh

ROWS, OTHERS, WIDTH = 23, 31, 5


def of_rows(x, y, shared):
    return torch.sin(x * y + shared).prod(1)


def of_one_side(x, *_):
    return x.square().sin().sum(0)


def of_more(x, y, _):
    return torch.tanh(x[:, None] * y).sum(2)


def inputs(*shapes, seed):
    generator = fresh(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


INDEX = torch.randint(0, OTHERS, (ROWS,), generator=fresh(1))  # some twice
CASES = {
    "paired": (of_rows, [(ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,)], {}),
    "chosen": (of_rows, [(ROWS, WIDTH), (OTHERS, WIDTH), (WIDTH,)], {"index": INDEX}),
    "several": (of_more, [(ROWS, WIDTH), (ROWS, 3, WIDTH)], {}),
    "summed": (of_one_side, [(ROWS, WIDTH)], {"summed": True}),
}


@pytest.fixture(autouse=True, params=[1, 4 * WIDTH, 1 << 16], ids=["row", "band", "all"])
def small_bands(request, monkeypatch):
    monkeypatch.setattr(bands, "BAND", request.param)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wanted", [(0,), (0, 1, 2), (1, 2)])
def test_result_and_gradients(name, wanted):
    function, shapes, options = CASES[name]
    given = inputs(*shapes, seed=2)
    places = [place for place in wanted if place < len(given)]
    if not places:
        pytest.skip("this function has no such input")
    for place, value in enumerate(given):
        value.requires_grad_(place in places)
    taken = [*given, None, None][:3]
    index = options.get("index")
    truth = function(taken[0], taken[1] if index is None else taken[1][index], taken[2])
    got = by_bands(function, *taken, **options)
    above = torch.randn(truth.shape, generator=fresh(3), dtype=torch.float64)
    sides = [given[place] for place in places]
    results = [got, *torch.autograd.grad(got, sides, above)]
    truths = [truth, *torch.autograd.grad(truth, sides, above)]
    for mine, theirs in zip(results, truths, strict=True):
        # A sum over the rows in another order: each addition rounds once.
        size = ROWS * theirs.abs().max().clamp(min=1.0)
        assert (mine - theirs).abs().max() <= ROWS * torch.finfo(torch.float64).eps * size


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_gradients(name):
    function, shapes, options = CASES[name]
    given = inputs(*shapes, seed=4)

    def banded(*given):
        return by_bands(function, *given, **options)

    assert torch.autograd.gradcheck(banded, given)
    assert torch.autograd.gradgradcheck(banded, given)


def test_no_rows():
    x, y = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(4, WIDTH, requires_grad=True)
    index = torch.zeros(0, dtype=torch.int64)
    result = by_bands(of_rows, x, y, torch.ones(WIDTH), index=index)
    result.sum().backward()
    assert result.shape == (0,)
    assert (y.grad == 0).all()


def test_gradients_of_what_is_shared_add_up_in_a_wider_type():
    """Each band's part is rounded to bfloat16, and so is their sum, but none of the sums before."""
    x = (torch.rand(1000, 1, generator=fresh(5)) + 1).bfloat16()
    shared = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    by_bands(lambda x, _, shared: (x * shared).sum(1), x, None, shared).sum().backward()
    truth = x.double().sum()
    assert (shared.grad - truth).abs() <= torch.finfo(torch.bfloat16).eps * truth


@pytest.mark.parametrize("taken", [False, True], ids=["bands", "rows"])
def test_gradients_of_one_row_add_up_in_a_wider_type(taken):
    """As above, of a row that a thousand others are held against."""
    x = (torch.rand(1000, 1, generator=fresh(6)) + 1).bfloat16()
    y = torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.ones(1000, dtype=torch.int64)
    if taken:
        result = (x * take_rows(y, index)).sum(1)
    else:
        result = by_bands(lambda x, y, _: (x * y).sum(1), x, y, index=index)
    result.sum().backward()
    truth = torch.tensor([[0.0], [1.0], [0.0]]) * x.double().sum()
    assert y.grad.dtype == y.dtype
    assert ((y.grad - truth).abs() <= torch.finfo(torch.bfloat16).eps * truth).all()


def test_bands_are_cut_by_the_larger_side():
    x, y = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, 3, WIDTH)
    own, other = (len(bands._bands(*sides, None)) for sides in ((x, None), (x, y)))
    assert own <= other
    assert other == len(bands._bands(y, None, None))
    assert len(bands._bands(x, y, torch.zeros(ROWS, dtype=torch.int64))) == own
