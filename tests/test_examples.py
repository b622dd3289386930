"""The scripts of fastsim/examples, in small: each trains, and its loss falls."""

import importlib
import inspect
import json
import pkgutil
import runpy
import statistics
import sys

import pytest
import torch

import fastsim.examples

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")
from tests import models
from tests.training.processes import run_together

NAMES = [module.name for module in pkgutil.iter_modules(fastsim.examples.__path__)]
# Hard negatives become harder meanwhile, and all but two_towers train with dropout.
STEPS = {"two_towers": 60, "mine_and_retrain": 60, "late_interaction": 24}
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


@pytest.mark.parametrize("name", ["grad_cache", "late_interaction", "mine_and_retrain"])
def test_a_loop_of_our_own_trains_with_dropout(name, monkeypatch):
    """A model that is loaded is in evaluation mode."""
    seen, dropout = [], torch.nn.functional.dropout

    def spied(values, p=0.5, training=True, inplace=False):
        seen.append(training and torch.is_grad_enabled())
        return dropout(values, p, training, inplace)

    monkeypatch.setattr(torch.nn.functional, "dropout", spied)
    script = importlib.import_module(f"fastsim.examples.{name}")
    script.main(model=str(models.tiny_bert()), steps=2)
    assert any(seen)


def run_as_main(module, *arguments):
    """`python -m module` in this process."""
    sys.argv[1:] = map(str, arguments)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_two_processes(tmp_path):
    """The same script as torchrun runs it."""
    said = run_together(tmp_path, run_as_main, "fastsim.examples.grad_cache", models.tiny_bert())
    ranks = [json.loads(text.strip().splitlines()[-1]) for text in said]
    losses = [statistics.mean(both) for both in zip(*ranks, strict=True)]
    assert statistics.mean(losses[-4:]) < statistics.mean(losses[:4])
