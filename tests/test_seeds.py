"""Random inputs follow FASTSIM_SEED, in every place of a file of tests."""

import os
import subprocess
import sys

import torch

from tests.seeds import SEED, fresh

DRAWN = torch.randn(5)  # when the file is imported, whatever was drawn before


def test_what_a_file_draws_when_it_is_imported():
    assert torch.equal(DRAWN, torch.randn(5, generator=torch.Generator().manual_seed(SEED)))


def test_what_a_test_draws():
    assert torch.equal(torch.randn(5), DRAWN)


def test_a_place_has_inputs_of_its_own():
    one, again, other = (torch.randn(5, generator=fresh(place)) for place in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_run_that_is_given_no_seed_draws_one():
    """The same inputs for every run would hide what others show; CI wants them."""
    code = "from tests import seeds; print(seeds.SEED)"

    def seeds(environment):
        command = [sys.executable, "-c", code]
        return [
            int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        ]

    bare = {name: os.environ[name] for name in os.environ if name not in ("CI", "FASTSIM_SEED")}
    one, other = seeds(bare)
    assert one != other
    assert seeds(bare | {"CI": "1"}) == [1, 1]
    assert seeds(bare | {"CI": "1", "FASTSIM_SEED": "7"}) == [7, 7]
