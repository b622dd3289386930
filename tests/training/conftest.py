import importlib.util

import pytest


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch):
    if importlib.util.find_spec("matplotlib") is not None:
        from tests.training.pictures import leave_empty

        leave_empty(monkeypatch.setattr)
