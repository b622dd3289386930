"""Which names a module in the place of a peer's has to have."""

import sys


def shown(module):
    return [name for name in dir(module) if not name.startswith("__")]


def assert_serves(ours, theirs):
    """Every name of theirs is theirs, or a class of ours below it, or a module of ours."""
    for attribute in shown(theirs):
        found, wanted = getattr(ours, attribute), getattr(theirs, attribute)
        replaced = isinstance(found, type) and issubclass(found, wanted)
        module = sys.modules.get(f"{ours.__name__}.{attribute}")
        assert found is wanted or replaced or found is module, attribute
    assert set(shown(theirs)) <= set(dir(ours))
