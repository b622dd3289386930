"""The tuning command's choice, with the interpreter for a device and given times."""

import pytest
import torch

from bench import tune_triton
from fastsim.backends.triton.kernels import table

FIRST = table.BlockSizes(16, 32, 64, 2, 4, 1, 16, 0, True)
SECOND = FIRST._replace(width=32, descriptors=False)
UNFIT = FIRST._replace(depth=48)  # no power of two: it does not build


@pytest.mark.parametrize("second_is", ["faster", "slower"])
def test_the_fastest_becomes_the_entry(second_is, monkeypatch):
    monkeypatch.setattr(tune_triton, "candidates", lambda *_: (FIRST, SECOND, UNFIT))

    def given(run, seconds):
        run()
        current = table.TABLE["interpreter", "float16", "shallow"]
        return 2.0 if (current == FIRST) == (second_is == "faster") else 1.0

    monkeypatch.setattr(tune_triton, "milliseconds", given)
    depth, before = 64, dict(table.TABLE)
    rows = list(tune_triton.tune(20, 40, depth, "float16", torch.device("cpu")))
    assert before == table.TABLE
    assert [("not_measured" in row) for row in rows] == [False, False, True]
    assert {*rows[0]} >= {
        "softmax forward reduction",
        "softmax score gradient",
        "softmax fused pass",
        "sigmoid fused pass",
    }
    made = eval("{" + tune_triton.entry(rows) + "}", {"BlockSizes": table.BlockSizes})
    best = SECOND if second_is == "faster" else FIRST
    assert made == {("interpreter", "float16", "shallow"): best._replace(break_even=depth)}
