"""A run that was broken off goes on where it was; one that begins says how long it will take."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("click.testing")
from click.testing import CliRunner

from fastsim import files
from fastsim.benchmark import duration, processes, results
from fastsim.benchmark.duration import minutes
from fastsim.benchmark.parts import Parts
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
    assert "continue it with --resume" in again.output
    other = bench("--out", str(out), "--resume", "--seconds", "0.3")
    assert other.exit_code == 2
    assert "has other settings than this run" in other.output
    assert len(measured) == 2
    (tmp_path / "run.jsonl.parts/.2.jsonl-0.part").touch()  # cut off while it was written
    done = bench("--out", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert len(measured) == 4  # the second and the third
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert results.read(out)[0]["settings"]["processes"] == 3
    assert "resume: wanted the --out" in bench("--resume").output


def test_a_file_that_is_there_stays_unless_one_says_otherwise(measured, tmp_path):
    out = tmp_path / "run.jsonl"
    out.write_text("mine")
    refused = bench("--out", str(out))
    assert refused.exit_code == 5
    assert f"out: '{out}' exists already; --overwrite replaces it" in refused.output
    assert (measured, out.read_text()) == ([], "mine")
    measured += [None, None]
    done = bench("--out", str(out), "--overwrite")
    assert done.exit_code == 0, done.output
    assert results.read(out)[0]["settings"]["processes"] == 3


def test_going_on_writes_over_nothing_but_a_run_that_was_broken_off(measured, tmp_path):
    out = tmp_path / "run.jsonl"

    def refused(text, why):
        out.write_text(text)
        done = bench("--out", str(out), "--resume")
        assert done.exit_code == 5
        assert f"out: '{out}' {why}; --overwrite replaces it" in done.output
        assert out.read_text() == text
        assert len(measured) == before

    before = 0
    refused("my notes", "is not an interrupted run")
    refused('{"settings": {}}', "is complete already")
    out.unlink()
    assert bench("--out", str(out)).exit_code != 0
    before, begun = 2, out.read_text()
    refused("my notes", "is not an interrupted run")
    out.write_text(begun)
    kept = tmp_path / "run.jsonl.parts/1.jsonl"
    for other in (("--processes", "0"), ("--measure", "error"), ("--from", str(kept))):
        assert bench("--out", str(out), "--resume", *other).exit_code == 2
        assert (len(measured), kept.is_file(), out.read_text()) == (2, True, begun)
    assert bench("--out", str(out), "--resume").exit_code == 0


def test_where_nothing_can_be_written_nothing_is_measured(measured, tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = bench("--out", str(file / "run.jsonl"))
    assert done.exit_code == 5
    assert f"out: cannot make the folder '{file}'" in done.output
    if Path("/proc/self").exists():
        done = bench("--out", "/proc/run.jsonl")
        assert done.exit_code == 5
        assert "out: cannot write '/proc/run.jsonl'" in done.output
    assert measured == []


def test_figures_that_cannot_be_kept_are_shown(measured, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    done = bench("--out", str(tmp_path / "run.jsonl"))
    assert done.exit_code == 5
    assert f"{results.device_name()}, commit" in done.stdout
    assert "not kept, should the run be interrupted: " in done.stderr
    assert len(measured) == 1


def test_the_settings_are_looked_at_first(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(results.torch.cuda, "is_available", lambda: False)
    done = bench("--out", str(tmp_path), "--device", "cuda")
    assert done.exit_code == 2
    assert "device: wanted one of this machine, got 'cuda'" in done.output


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    about = {"settings": {}}
    results.write(tmp_path / "run.jsonl", about, [{"row": 1}])

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="disk full: cannot write"):
        results.write(tmp_path / "run.jsonl", about, [{"row": 2}])
    assert results.read(tmp_path / "run.jsonl") == (about, [{"row": 1}])
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_the_time_is_said_beforehand(measured, tmp_path):
    measured += [None, None]
    assert "minutes on a quiet machine" in bench("--out", str(tmp_path / "run.jsonl")).output


@pytest.mark.parametrize("name", ["device", "versions", "commit"])
def test_parts_of_another_machine_or_code_are_refused(name, tmp_path):
    about = {"device": "d", "settings": {}, "versions": {"torch": "2"}, "commit": "c"}
    parts = Parts(tmp_path / "run.jsonl")
    assert parts.load_or_measure("1", about, lambda: [{"row": 1}]) == [{"row": 1}]
    assert parts.load_or_measure("1", about, lambda: pytest.fail("measured again")) == [{"row": 1}]
    with pytest.raises(ValueError, match=f"has other {name} than this run"):
        parts.load_or_measure("1", about | {name: "another"}, lambda: pytest.fail("measured again"))


def test_the_time_that_a_run_takes(monkeypatch):
    """2 n^2 d operations of a product at a rate of 1e9: of InfoNCE three, taken twice as long."""
    monkeypatch.setattr(duration, "_rate", lambda settings: 1e9)
    few = {"losses": ("info_nce",), "baselines": ("eager torch",), "backends": ("cpu",)}
    asked = Settings(**few, sizes=(100, 4000), dims=(50,), seconds=0.5, limit=9.0, processes=5)
    begun = 6.0
    small = 2 * 0.5  # both passes; 0.006 s a call are less
    large = 2 * 3 * 2 * (2 * 3 * 4000**2 * 50 / 1e9)  # two of them, three rounds each
    times = replace(asked, measures=("time",), limit=99.0)
    # The fifth process leaves out what is large.
    assert minutes(times) == pytest.approx((5 * (begun + small) + 4 * large) / 60)
    # A call of 9.6 s is beyond the limit and not made.
    assert minutes(replace(times, limit=9.0)) == pytest.approx((5 * begun + 9 * small) / 60)
    memory = replace(asked, measures=("memory",))
    assert minutes(memory) == pytest.approx(2 * 2 * 3.0 / 60)


def test_the_rate_of_a_run_is_that_of_a_product(monkeypatch):
    monkeypatch.setattr(duration, "in_turns", lambda *_, **__: {"product": [0.5, 0.25]})
    assert duration._rate(Settings()) == 2 * 1024**3 / 0.25


def test_more_takes_longer():
    few = {"measures": ("time",), "losses": ("siglip",), "baselines": ("none",)}
    small = minutes(Settings(**few, sizes=(64,)))
    assert small < minutes(Settings(**few, sizes=(64, 128)))
    assert small < minutes(Settings(**few, sizes=(64,), processes=2))
