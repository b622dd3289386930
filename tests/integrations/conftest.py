"""What the tests of drop-ins share."""

import pytest

from fastsim.integrations import overrides


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Each test hears what is said once in a process."""
    monkeypatch.setattr(overrides, "_warned", set())
