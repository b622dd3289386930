"""Packages that are older than training needs are refused by name."""

import pytest

pytest.importorskip("packaging")
from fastsim.training import required

NEEDED = ["torch>=2.10", 'their-package>=5.5; extra == "train"', 'other; extra == "train"']
NEEDED += ['of-another-extra>=9; extra == "bench"']


@pytest.fixture
def installed(monkeypatch):
    """A distribution with these requirements; what is installed is written into the result."""
    found = {"torch": "1.0", "their-package": "5.5.1", "other": "0.1", "of-another-extra": "1"}
    monkeypatch.setattr(required, "requires", lambda distribution: NEEDED)

    def version(name):
        if name not in found:
            raise required.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(required, "version", version)
    return found


@pytest.mark.parametrize("version", ["5.5.0", "5.10", "6.0.0.dev1"])
def test_recent_packages_pass(installed, version):
    installed["their-package"] = version
    required.check_packages()


def test_an_older_package_is_refused(installed):
    installed["their-package"] = "5.4.2"
    with pytest.raises(ImportError, match=r"^their-package: wanted >=5\.5, got 5\.4\.2; pip"):
        required.check_packages()


def test_a_missing_package_is_refused(installed):
    del installed["other"]
    with pytest.raises(ImportError, match=r"^other: wanted any version, got none; pip"):
        required.check_packages()


def test_sources_that_were_not_installed_pass(monkeypatch):
    def missing(distribution):
        raise required.PackageNotFoundError(distribution)

    monkeypatch.setattr(required, "requires", missing)
    required.check_packages()


def test_a_run_looks_at_them_first(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    from fastsim.training import run

    def refuse():
        raise ImportError("too old")

    monkeypatch.setattr(run, "check_packages", refuse)
    with pytest.raises(ImportError, match="too old"):
        run.train(None)
