"""What ranks tell each other of a call, before they exchange data that has to fit."""

import pytest
import torch

import fastsim
from fastsim import agreement, distributed

ROWS = 4


@pytest.fixture
def told(alone, monkeypatch):
    """A call -> what this rank tells of it."""

    def of(call):
        found = []

        def agree(group, said, numbers):
            found.append(said)
            return agreement.agree(group, said, numbers)

        monkeypatch.setattr(distributed, "agree", agree)
        call(torch.randn(ROWS, 6), torch.randn(ROWS, 6))
        (said,) = found
        return said

    return of


def guided(width, dtype=torch.float32):
    """A loss with a guide of this width."""
    guide = tuple(torch.randn(2, ROWS, width).to(dtype))
    return lambda x, y: fastsim.info_nce(x, y, guide=guide, group=torch.distributed.group.WORLD)


def taught(width):
    """A loss with a teacher of this width."""
    teacher = torch.randn(2, ROWS, width)
    return lambda x, y: fastsim.distill(x, y, *teacher, group=torch.distributed.group.WORLD)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("guide", [guided(3), guided(5), guided(3, torch.bfloat16)]),
        ("teacher_y", [taught(3), taught(5)]),
    ],
)
def test_ranks_tell_how_wide_what_they_gather_is(name, calls, told):
    """Else one would read what another did not write: gloo ends the process, NCCL waits."""
    found = [told(call) for call in calls]
    assert len({said.pop(name) for said in found}) == len(calls)
    assert all(said == found[0] for said in found)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_number_that_is_learnt_is_another(device):
    """Its gradient is summed over the ranks, also where its value is not waited for."""
    fixed, learnt = (torch.tensor(0.5, device=device, requires_grad=flag) for flag in (False, True))
    assert agreement.describe(learnt) == f"{agreement.describe(fixed)} (learnt)"


@pytest.mark.parametrize("last", [True, False])
def test_an_error_is_told_until_data_follow(last, alone, monkeypatch):
    """After that nobody would read it; before it the others would wait."""
    told = []
    monkeypatch.setattr(agreement, "tell", lambda group, error: told.append(str(error)))

    def call():
        with agreement.failures_are_told(alone):
            agreement.agree(alone, {}, [], last=last)
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        call()
    assert told == ([] if last else ["late"])
