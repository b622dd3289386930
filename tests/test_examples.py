"""The scripts of fastsim/examples, in small: each trains, and its loss falls."""

import importlib
import inspect
import json
import os
import pkgutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import fastsim.examples

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")
from tests import models

NAMES = [module.name for module in pkgutil.iter_modules(fastsim.examples.__path__)]
STEPS = {"two_towers": 60}
PEERS = {"lightning_module": "pytorch_lightning", "open_clip_loop": "open_clip"}


def test_every_script_is_listed():
    table = fastsim.examples.__doc__
    assert all(f"| `{name}` |" in table for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_the_loss_falls(name):
    if name in PEERS:
        pytest.importorskip(PEERS[name])
    script = importlib.import_module(f"fastsim.examples.{name}")
    model = (
        {"model": models.tiny_bert()}
        if "model" in inspect.signature(script.main).parameters
        else {}
    )
    losses = script.main(**{k: str(v) for k, v in model.items()}, steps=STEPS.get(name, 12))
    assert len(losses) >= 12
    assert statistics.mean(losses[-4:]) < statistics.mean(losses[:4])


def test_two_processes():
    """The same script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        "-m",
        "fastsim.examples.grad_cache",
        str(models.tiny_bert()),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(fastsim.__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(line) for line in done.stdout.strip().splitlines()[-2:]]
    losses = [statistics.mean(both) for both in zip(*ranks, strict=True)]
    assert statistics.mean(losses[-4:]) < statistics.mean(losses[:4])
