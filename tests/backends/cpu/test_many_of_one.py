"""The gradient of a row that thousands of others chose, as where all rows have become the same."""

import pytest
import torch

import fastsim
from fastsim.backends import get
from tests.seeds import fresh

ROWS, WIDTH = 20_000, 300
ROUNDING = 2.0**-24  # of a float32 number
TOGETHER = 64  # terms that are added in float32: kRowsOfSum of csrc/cpu/chosen_rows.h


@pytest.mark.parametrize("distances", [False, True])
def test_a_column_that_all_rows_chose(distances, usable):
    """Each term is rounded once, and the sum, which is made in float64."""
    usable("cpu")
    random = fresh(61)
    x = 1 + torch.rand(ROWS, WIDTH, generator=random)
    y, grad = -torch.rand(2, WIDTH, generator=random), torch.rand(1, ROWS, generator=random)
    columns = torch.ones(1, ROWS, dtype=torch.int64)
    values = 1 + torch.rand(1, ROWS, generator=random) if distances else None
    given = grad, values, x, y, columns, distances, (False, True)
    _, found = get("cpu").chosen_rows_backward(*given)
    terms = grad[0].double()[:, None] * x.double()
    if distances:
        of_pair = (grad / values).double()[0, :, None]
        terms = of_pair * (y[1].double() - x.double())
    wanted = terms.sum(0)
    assert not found[0].any()
    error = (found[1].double() - wanted).abs()
    assert (error <= ROUNDING * (terms.abs().sum(0) + wanted.abs())).all()


def test_a_closest_negative_of_all_rows(usable):
    """Of rows that are all the same; the gradient of their common negative is 0."""
    usable("cpu")
    row = torch.randn(WIDTH, generator=fresh(62))
    x, y = row.repeat(ROWS, 1), -row.repeat(ROWS, 1)
    y[0] = row
    y.requires_grad_()
    options = {"mining": "hard", "margin": 1.0, "backend": "cpu"}
    fastsim.full_triplet(x, y, **options).backward()
    unit = row.double().abs() / row.double().norm()
    # Both terms of a row are made of four rounded factors; ROWS of them have the weight 1 / ROWS.
    most = (TOGETHER + 4) * ROUNDING * 2 * unit
    # What is left of the errors of others when that along the row is taken away.
    most = (most + unit * (unit * most).sum()) / row.double().norm()
    assert (y.grad[0].double().abs() <= most).all()
