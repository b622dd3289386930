"""Environment variables: read at every call, and in blocks that overlap as those of threads do."""

import os
from contextlib import ExitStack

import pytest

from fastsim.environment import Variable, variables

NAMES = "FASTSIM_TEST_ONE", "FASTSIM_TEST_OTHER"


def values():
    return tuple(os.environ.get(name) for name in NAMES)


@pytest.mark.parametrize("before", [None, "kept"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_blocks_end_in_any_order(order, before, monkeypatch):
    """The environment is that of the last to begin of those that are open, and then as before."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(NAMES[0], before)
    blocks = [ExitStack() for _ in order]
    for index, block in enumerate(blocks):
        block.enter_context(variables({NAMES[0]: str(index)}))
        assert values()[0] == str(index)
    remaining = list(range(len(order)))
    for index in order:
        blocks[index].close()
        remaining.remove(index)
        assert values()[0] == (str(max(remaining)) if remaining else before)


def test_blocks_of_different_names(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    first, second = ExitStack(), ExitStack()
    first.enter_context(variables({NAMES[0]: "a", NAMES[1]: "b"}))
    second.enter_context(variables({NAMES[1]: "c"}))
    first.close()
    assert values() == (None, "c")
    second.close()
    assert values() == (None, None)


def test_a_variable_that_somebody_deletes_within(monkeypatch):
    monkeypatch.setenv(NAMES[0], "kept")
    with variables({NAMES[0]: "a"}):
        del os.environ[NAMES[0]]
    assert values()[0] == "kept"


def test_a_variable_has_its_value_of_now(monkeypatch):
    variable = Variable(NAMES[0])
    assert variable.name == NAMES[0]
    monkeypatch.delenv(NAMES[0], raising=False)
    assert variable.value() == ""
    for value in ("torch", "", "schnell ✓"):
        monkeypatch.setenv(NAMES[0], value)
        assert variable.value() == value
    with variables({NAMES[0]: "in a block"}):
        assert variable.value() == "in a block"
    monkeypatch.delenv(NAMES[0])
    assert variable.value() == ""
