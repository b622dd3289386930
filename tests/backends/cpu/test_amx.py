"""The products of bfloat16 operands: over an emulation of a matrix unit's instructions and, where
they are there, on the unit and by dot products.

The library chooses among them once, so each runs the checks of the files amx_*.py and those of the
arguments in a fresh process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastsim.backends import backends, get

CHECKS = [
    Path(__file__).with_name(f"{name}.py")
    for name in ("amx_products", "amx_losses", "amx_rows", "test_arguments")
]
BEST = "" if backends()["cpu"] else torch.ops.fastsim_cpu.amx_name()
# By FASTSIM_AMX; None: not set. A processor with the unit has the dot products too.
SETS = {"amx_emulated": "emulated"}
SETS |= {"amx": None} if BEST == "amx" else {}
SETS |= {"avx512_bf16": "avx512_bf16"} if BEST in ("amx", "avx512_bf16") else {}


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
    pytest_run = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(checks)]
    done = in_fresh_process(pytest_run, SETS[name])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_turned_off_by_a_variable(usable):
    usable("cpu")
    report = "from fastsim.cli.info import report; print(report())"
    assert "products on amx_emulated" in in_fresh_process(["-c", report], "emulated").stdout
    off = in_fresh_process(["-c", report], "0").stdout
    assert "kernels" in off
    assert "kernels, products" not in off


def test_a_wish_that_is_none(usable):
    usable("cpu")
    ask = "from fastsim.backends.cpu import amx; amx.name()"
    done = in_fresh_process(["-c", ask], "avx512")
    assert "FASTSIM_AMX: wanted 0, emulated or" in done.stderr
    assert "got avx512" in done.stderr


def test_info_names_the_products_in_use(usable):
    usable("cpu")
    kinds = {"": "", "avx512_bf16": "products of bfloat16 on avx512_bf16"}
    wanted = kinds.get(BEST, f"products on {BEST}")
    assert wanted in get("cpu").note()
    assert ("products" in get("cpu").note()) == bool(BEST)
