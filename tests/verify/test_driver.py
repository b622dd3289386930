"""What tells one driver from another."""

import ctypes

import pytest
import torch

from fastsim.verify import driver


class Library:
    """NVIDIA's management library; status: of its calls, 0 for success."""

    def __init__(self, status=0):
        self.status, self.open = status, 0

    def nvmlInit_v2(self):  # noqa: N802
        self.open += 1
        return 0

    def nvmlSystemGetDriverVersion(self, said, length):  # noqa: N802
        said.value = b"580.159.04"
        assert length.value == len(said)
        return self.status

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1
        return 0


@pytest.mark.parametrize(("status", "said"), [(0, "580.159.04"), (3, "")])
@pytest.mark.parametrize("name", driver.NVIDIA)
def test_nvidia(name, status, said, monkeypatch):
    library = Library(status)

    def load(asked):
        if asked != name:
            raise OSError(f"{asked}: cannot open shared object file")
        return library

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert driver.version() == said
    assert library.open == 0


def test_amd(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(driver, "AMD", tmp_path / "version")
    assert driver.version() == ""
    driver.AMD.write_text("6.12.12\n")
    assert driver.version() == "6.12.12"


def test_no_driver(monkeypatch):
    def load(asked):
        raise OSError(f"{asked}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert driver.version() == ""
