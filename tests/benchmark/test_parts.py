"""A run that was broken off goes on where it was; one that begins says how long it will take."""

import pytest

pytest.importorskip("click.testing")
from click.testing import CliRunner

from fastsim.benchmark import processes, results
from fastsim.benchmark.duration import minutes
from fastsim.benchmark.settings import Settings
from fastsim.cli.main import main

FEW = ("--loss", "siglip", "--baseline", "none", "--sizes", "8", "--dim", "4", "--measure", "time")


@pytest.fixture
def measured(monkeypatch):
    """The processes that were measured; the second is broken off when it is first begun."""
    begun = []

    def fresh(settings, progress):
        begun.append(settings)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(processes, "_fresh", fresh)
    return begun


def bench(*options):
    return CliRunner().invoke(main, ["bench", *FEW, "--processes", "3", *options])


def test_a_run_goes_on_where_it_was_broken_off(measured, tmp_path):
    out = tmp_path / "run.jsonl"
    assert bench("--out", str(out)).exit_code != 0
    assert [path.name for path in (tmp_path / "run.jsonl.parts").iterdir()] == ["1.jsonl"]
    again = bench("--out", str(out))
    assert again.exit_code == 2
    assert "go on with --resume" in again.output
    other = bench("--out", str(out), "--resume", "--seconds", "0.3")
    assert other.exit_code == 2
    assert "has other settings than this run" in other.output
    assert len(measured) == 2
    done = bench("--out", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert len(measured) == 4  # the second and the third
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert results.read(out)[0]["settings"]["processes"] == 3
    assert "resume: wanted the --out" in bench("--resume").output


def test_the_time_is_said_beforehand(measured, tmp_path):
    measured += [None, None]
    assert "minutes on a quiet machine" in bench("--out", str(tmp_path / "run.jsonl")).output


def test_more_takes_longer():
    few = {"measures": ("time",), "losses": ("siglip",), "baselines": ("none",)}
    small = minutes(Settings(**few, sizes=(64,)))
    assert small < minutes(Settings(**few, sizes=(64, 128)))
    assert small < minutes(Settings(**few, sizes=(64,), processes=2))
