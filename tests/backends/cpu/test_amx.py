"""The products on a matrix unit, over an emulation of its instructions and, where there, on it.

The library looks for the unit once, so each runs the checks of amx_products.py
and amx_losses.py in a fresh process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastsim.backends import backends, get

CHECKS = [Path(__file__).with_name(f"amx_{what}.py") for what in ("products", "losses")]
SETS = ["amx_emulated"]
if backends()["cpu"] is None and torch.ops.fastsim_cpu.amx_name() == "amx":
    SETS.append("amx")


def in_fresh_process(command, wish):
    environment = {k: v for k, v in os.environ.items() if k != "FASTSIM_AMX"}
    if wish is not None:
        environment["FASTSIM_AMX"] = wish
    run = [sys.executable, *command]
    return subprocess.run(run, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", SETS)
def test_checks(name, checks, usable):
    usable("cpu")
    wish = "emulated" if name == "amx_emulated" else None
    pytest_run = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(checks)]
    done = in_fresh_process(pytest_run, wish)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_turned_off_by_a_variable(usable):
    usable("cpu")
    report = "from fastsim.cli.info import report; print(report())"
    assert "products on amx_emulated" in in_fresh_process(["-c", report], "emulated").stdout
    off = in_fresh_process(["-c", report], "0").stdout
    assert "kernels" in off
    assert "amx" not in off


def test_info_names_the_products_in_use(usable):
    usable("cpu")
    name = torch.ops.fastsim_cpu.amx_name()
    assert (f"products on {name}" in get("cpu").note()) == bool(name)
