"""A loss is named wherever a reader or a test looks for it (fastsim/README.md, "Add a loss")."""

import inspect
from pathlib import Path

import pytest

import fastsim
from fastsim import losses
from tests.cases import CASES

FOLDER = Path(inspect.getfile(losses)).parent
# A file whose loss is a function of its own name.
STEMS = sorted(p.stem for p in FOLDER.glob("*.py") if inspect.isfunction(vars(losses).get(p.stem)))


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_is_named_everywhere(stem):
    function = vars(losses)[stem]
    assert stem in losses.__all__
    assert getattr(fastsim, stem, None) is function, "fastsim/public.py"
    assert stem in fastsim.__all__
    modules = [m for m in vars(losses).values() if getattr(m, "function", None) is function]
    assert len(modules) == 1, "a module in its file, named in fastsim/losses/__init__.py"
    assert modules[0].__name__ in losses.__all__
    dense = f"{stem}_from_scores"
    if hasattr(inspect.getmodule(function), dense):
        assert dense in losses.__all__
        assert losses.SPECIFICATIONS[function] is vars(losses)[dense]
    assert any(case.loss is function for case in CASES), "tests/cases.py"


@pytest.mark.parametrize("stem", STEMS)
def test_a_loss_file_opens_with_formula_and_source(stem):
    text = inspect.getdoc(inspect.getmodule(vars(losses)[stem]))
    assert "Source: " in text
    assert any(line.startswith("    ") and "=" in line for line in text.splitlines())


def test_there_are_losses():
    assert {"info_nce", "circle", "decoupled_contrastive"} <= {*STEMS}
