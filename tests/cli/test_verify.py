"""`fastsim verify` where there is nothing to check: no script takes that for right kernels."""

import pytest
from click.testing import CliRunner

from fastsim.cli import command
from fastsim.cli.main import main


def verify(*options):
    return CliRunner().invoke(main, ["verify", *options])


@pytest.mark.parametrize("name", ["foo", "", "cuda:x"])
def test_a_device_that_torch_does_not_know_is_named(name):
    done = verify("--device", name)
    assert done.exit_code == command.USAGE
    wanted = f"--device: wanted the name of a device in torch, such as cuda:0, got {name!r}"
    assert done.stderr == f"Error: {wanted}\n"


@pytest.mark.parametrize("name", ["cuda:99", "xpu:99"])
def test_a_device_that_this_machine_lacks_is_a_reason(name):
    """torch says so by an error of another kind if it was built without such devices."""
    done = verify("--device", name)
    assert done.exit_code == command.FAILED
    assert [line.split(":")[:2] for line in done.stdout.splitlines()] == [
        ["not checked", " triton"],
        ["not checked", " cuda"],
    ]
    assert f"nothing was checked: none of the chosen kernels can run on {name!r}" in done.stderr


def test_where_nothing_can_be_checked_it_fails():
    done = verify("--device", "meta")
    assert done.exit_code == command.FAILED
    assert [line.split(":")[:2] for line in done.stdout.splitlines()] == [
        ["not checked", " triton"],
        ["not checked", " cuda"],
    ]
    assert "nothing was checked: none of the chosen kernels can run on 'meta'" in done.stderr
