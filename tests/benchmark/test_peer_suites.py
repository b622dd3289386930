"""The tests of another package with our classes in their place: what passes with which."""

import inspect

import pytest

pytest.importorskip("pytorch_metric_learning", reason="it is not installed")

from bench.peer_suites.__main__ import compared
from bench.peer_suites.swap import MODULES, classes

SUITE = """
from pytorch_metric_learning.losses import ContrastiveLoss, NTXentLoss
from pytorch_metric_learning.losses.ntxent_loss import NTXentLoss as AtHome

def test_both():
    NTXentLoss(temperature=0.5)

def test_theirs():
    assert AtHome is NTXentLoss
    assert type(NTXentLoss()).__module__.startswith("pytorch_metric_learning")

def test_neither():
    ContrastiveLoss(no_such_option=1)
"""


def test_what_differs(tmp_path):
    path = tmp_path / "tests" / "test_losses.py"
    path.parent.mkdir()
    path.write_text(SUITE)
    (row,) = compared(tmp_path, "pytorch_metric_learning", [path], 60)
    assert (row["tests"], row["passed"], row["by"]) == (3, [2, 1], ["NTXentLoss"])
    assert list(row["failed with theirs"]) == ["test_neither"]
    (before, after, error) = row["differ"].pop("test_theirs")
    assert (before, after) == ("passed", "failed")
    assert "fastsim.integrations" in error
    assert not row["differ"]


def test_every_class_of_ours_is_swapped():
    package = "pytorch_metric_learning"
    found = classes(package)
    assert all(issubclass(ours, theirs) for theirs, ours in found.items())
    for ours in MODULES[package].values():
        module = __import__(ours, fromlist=["losses"])
        own = {k for k in vars(module).values() if inspect.isclass(k) and k.__module__ == ours}
        public = {k for k in own if not k.__name__.startswith("_")}
        assert public <= set(found.values())
