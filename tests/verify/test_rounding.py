"""What rounding the rows' numbers amounts to."""

import math

import pytest
import torch

import fastsim
from fastsim.verify import cases, checks, rounding
from tests.verify import fakes

CPU = torch.device("cpu")
TF32 = 2.0**-11  # the largest relative error of a number of 11 significant bits


def moved(problem, dtype):
    truth = checks.outputs(problem, problem.exact, CPU, torch.float64)
    return truth, rounding.moves(problem, checks.outputs, truth, dtype, CPU)


class Rounding(fakes.Fake):
    """The torch backend, but for operands of 11 significant bits."""

    name = "rounding"
    round = staticmethod(torch.round)

    def tile_rows(self, x):
        rows, inverse = super().tile_rows(x)
        fraction, exponent = torch.frexp(rows)
        return torch.ldexp(self.round(fraction / TF32) * TF32, exponent), inverse


class Cutting(Rounding):
    """As tensor cores of TF32 cut what they are given."""

    name = "cutting"
    round = staticmethod(torch.trunc)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "decoupled"])
@pytest.mark.parametrize("backend", [Rounding(), Cutting()], ids=lambda backend: backend.name)
def test_operands_may_be_rounded_and_not_cut(backend, kind, precision, monkeypatch):
    precision("high")
    monkeypatch.setitem(fastsim.backends.__globals__["_BACKENDS"], backend.name, backend)
    monkeypatch.setattr(checks, "SMALL", (*checks.SMALL, (333, 517, 200)))
    found = checks.faults(backend.name, kind, torch.float32, CPU)
    assert bool(found) == (backend.name == "cutting"), found


def test_half_and_single_precision():
    """Of 16-bit inputs by the digits of float16; of float32 by the root of the width too."""
    problem = cases.problems("sigmoid", (9, 11, 64), torch.float32)[0]
    _, half = moved(problem, torch.float16)
    _, single = moved(problem, torch.float32)
    digits = torch.finfo(torch.float16).eps / torch.finfo(torch.float32).eps
    for one, other in zip(half, single, strict=True):
        assert one / other == pytest.approx(digits / math.sqrt(64), rel=0.05)


def test_equal_rows_stay_equal():
    made = cases.problems("closest", (9, 11, 6), torch.float32)
    problem = next(one for one in made if one.name == "ties")
    y = problem.leaves[1]
    y[1] = y[0]
    near = rounding.rounded(problem, 1e-3, 3).leaves[1]
    assert torch.equal(near[1], near[0])
    change = (near / y.double() - 1).abs()
    torch.testing.assert_close(change, torch.full_like(change, 1e-3))
    assert 0 < (near > y).sum() < y.numel()


def test_moves_are_root_mean_squares_of_different_draws():
    problem, drawn = cases.problems("sigmoid", (5, 7, 4), torch.float32)[0], []

    def outputs(changed, backend, device, dtype):
        drawn.append(changed.leaves[0])
        return [torch.tensor([0.5, 1.0 - len(drawn)])]

    found = rounding.moves(problem, outputs, [torch.tensor([0.5, 1.0])], torch.float32, CPU)
    squares = [(draw + 1) ** 2 for draw in range(rounding.DRAWS)]
    assert found == pytest.approx([math.sqrt(sum(squares) / len(squares))])
    assert all(not torch.equal(drawn[0], other) for other in drawn[1:])


def test_a_lucky_peer_is_no_limit(monkeypatch):
    """An error that rounding explains is none, whatever the torch backend's; a larger one is."""
    problem = cases.problems("sigmoid", (67, 75, 200), torch.float16)[0]
    right, allowed = moved(problem, torch.float16)
    real = checks.outputs
    for share, wrong in ((0.99, False), (1.01, True)):

        def outputs(one, backend, device, dtype=None, share=share):
            if dtype is not None:
                return real(one, backend, device, dtype)
            found = [part.clone() for part in right]
            if backend == "mine":
                found[0] += share * rounding.SPREAD * allowed[0]
            return found

        monkeypatch.setattr(checks, "outputs", outputs)
        fault = checks._fault("mine", problem, CPU)
        assert (fault is not None) == wrong
