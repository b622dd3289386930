"""Verdicts: kept in files, each of one key; what is right may be taken."""

import dataclasses
import json
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fastsim
from fastsim.backends import pick
from fastsim.cli.main import main
from fastsim.verify import run, verdicts

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.mark.parametrize("where", ["recorded", "compiled"])
def test_nothing_is_verified_under(where, two_kernels, monkeypatch):
    """Neither while a CUDA graph is recorded nor while torch.compile traces."""
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    monkeypatch.setattr(run, "verify", lambda *place: pytest.fail("verified"))
    if where == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = META if where == "compiled" else torch.device("cuda")
    monkeypatch.setattr(verdicts, "key", lambda *place: {})
    assert verdicts.verdict("fake", "sigmoid", torch.float32, device) is None
    assert not verdicts._known  # the next call may ask again


KEYED = {
    "device": "another",
    "capability": "8.9",
    "driver": "12.8 570",
    "torch": "1.0",
    "triton": "2.0",
    "kernels": "changed",
    "backend": "cuda",
    "kind": "levels",
    "dtype": "float16",
    "precision": "high",
}


def test_a_verdict_depends_on_all_of_its_key():
    verdict = kept("fake")
    assert set(KEYED) == set(verdict.key)
    for name, value in KEYED.items():
        assert verdict.key[name] != value
        assert verdicts.read(verdict.key | {name: value}) is None
    assert verdicts.read(verdict.key) == verdict


def kept(name, *, served=True, ratio=0.5, kind="sigmoid", dtype=torch.float32):
    of = verdicts.key(name, kind, dtype, META)
    verdict = verdicts.now(served, None if served else "it lies", ratio, of)
    verdicts.write(verdict)
    return verdict


def taken(kind="sigmoid", dtype=torch.float32):
    return pick(None, torch.empty(2, 2, device="meta", dtype=dtype), kind=kind).name


def test_a_verdict_is_read_while_a_loss_is_compiled(two_kernels):
    """By the compiler itself: files are nothing that it could trace."""
    kept("fake", kind="softmax")
    compiled = torch.compile(fastsim.info_nce, fullgraph=True, backend="eager")
    assert compiled(*torch.empty(2, 5, 4, device="meta")).shape == ()
    assert taken("softmax") == "fake"


def test_auto_takes_the_fastest_that_is_right(two_kernels):
    kept("fake", ratio=0.5)
    kept("lying", ratio=0.4)
    assert taken() == "lying"
    kept("lying", served=False, ratio=None)
    assert taken() == "fake"
    kept("fake", ratio=1.5)
    with pytest.warns(UserWarning, match="it lies"):
        assert taken() == "torch"


def test_what_was_not_timed_counts_as_fast_as_torch(two_kernels):
    kept("fake", ratio=None)
    assert taken() == "fake"
    kept("lying", ratio=0.9)
    assert taken() == "lying"
    of = dict.fromkeys(KEYED, "")
    found = [verdicts.now(True, None, ratio, of) for ratio in (None, 0.9)]
    refused = verdicts.now(False, "it lies", 0.5, of)
    equal, least, *never = map(verdicts._millionths, (*found, refused, None))
    assert least < equal == 10**6 < min(never)


@pytest.mark.parametrize("ratio", [0.9999999, 1.0, 1.0000005, 1.1, None])
def test_ranks_take_what_one_process_takes(ratio, two_kernels, monkeypatch):
    """No kernel that is as slow as the torch backend."""

    class Group:
        """What a weak reference can be taken of."""

    kept("fake", ratio=ratio)
    monkeypatch.setattr(verdicts, "agree", lambda group, said, mine, last: [mine])
    place = "sigmoid", torch.float32, META
    wanted = verdicts.fastest(("fake",), *place)
    assert verdicts.agreed(("fake",), *place, Group()) == wanted
    assert wanted == ("fake" if ratio is None or ratio < 1 else None)


@pytest.mark.parametrize("other", [{"kind": "levels"}, {"dtype": torch.float16}])
def test_a_verdict_is_of_one_kind_and_dtype(two_kernels, other):
    kept("fake")
    assert taken() == "fake"
    with pytest.warns(UserWarning, match="fastsim verify --device meta"):
        assert taken(**other) == "torch"


def test_without_a_verdict_it_is_said_once(two_kernels):
    with pytest.warns(UserWarning, match="takes the torch backend on meta"):
        assert taken() == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken("levels") == "torch"


def test_a_verdict_of_other_kernels_does_not_count(two_kernels, monkeypatch):
    kept("fake")
    monkeypatch.setattr(verdicts, "_kernels", lambda backend: "changed")
    verdicts.forget()
    with pytest.warns(UserWarning, match="fastsim verify"):
        assert taken() == "torch"


def test_the_variable_verifies_at_first_use(two_kernels, monkeypatch):
    asked = []

    def verify(*place):
        asked.append(place)
        return verdicts.now(True, None, 0.5, verdicts.key(*place))

    monkeypatch.setattr(run, "verify", verify)
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    assert taken() == "fake"
    assert taken() == "fake"
    assert [place[0] for place in asked] == ["fake", "lying"]


FILES = (
    "backends/rows.py",
    "losses/circle.py",
    "pairs/record.py",
    "tile_loss.py",
    "engine/passes.py",
)


def test_the_digest_is_of_all_that_numbers_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "PACKAGE", tmp_path)
    for name in (*FILES, "training/run.py", "cli/main.py", "_lib/fake.so", "_lib/other.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        assert (verdicts.PACKAGE / name).exists()
    assert all((Path(fastsim.__file__).parent / name).exists() for name in FILES)

    def changes(name):
        before = verdicts._kernels.__wrapped__("fake")
        (tmp_path / name).write_text("changed")
        return verdicts._kernels.__wrapped__("fake") != before

    assert all(changes(name) for name in (*FILES, "_lib/fake.so"))
    assert not any(changes(name) for name in ("training/run.py", "cli/main.py", "_lib/other.so"))
    before = verdicts._kernels.__wrapped__("fake")
    (tmp_path / FILES[0]).rename(tmp_path / "backends" / "rows_of_others.py")
    assert verdicts._kernels.__wrapped__("fake") != before  # by the name of a file alone


def test_a_verdict_that_is_written_is_the_one_that_counts():
    """For whoever has asked for it before, and for nobody else."""
    assert verdicts.verdict("fake", "sigmoid", torch.float32, META) is None
    assert verdicts.verdict("fake", "levels", torch.float32, META) is None
    kept("fake", kind="levels")
    assert list(verdicts._known) == [("fake", "sigmoid", torch.float32, META, "highest")]
    wanted = kept("fake")
    assert verdicts.verdict("fake", "sigmoid", torch.float32, META) == wanted


@pytest.mark.parametrize("named", ["FASTSIM_CACHE", "XDG_CACHE_HOME", None])
def test_without_a_home(named, tmp_path, two_kernels, monkeypatch):
    """None is looked for where a folder is named; without any a verdict lasts for the process."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("FASTSIM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv(named, str(tmp_path))
        kept("fake")
        assert verdicts.folder().is_relative_to(tmp_path)
        assert len(verdicts.everything()) == 1
    else:
        assert verdicts.folder() is None
        assert verdicts.everything() == []
        with pytest.warns(UserWarning, match="lost with this process: there is no home folder"):
            kept("fake")
        kept("lying", served=False)  # a second note would be an error
    assert taken() == "fake"


def test_a_cache_that_cannot_be_written(cache, two_kernels, monkeypatch):
    (cache / "verdicts").write_text("in the way")
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    monkeypatch.setattr(run, "results", lambda *part: [(None, 0.5)])
    with pytest.warns(UserWarning, match="lost with this process: .*FASTSIM_CACHE"):
        assert taken() == "fake"
    monkeypatch.delenv("FASTSIM_VERIFY")
    verdicts.forget()
    assert taken() == "fake"
    (cache / "verdicts").unlink()
    wanted = kept("fake", ratio=0.3)
    assert verdicts.read(wanted.key) == wanted
    assert len(verdicts.everything()) == 1
    assert not any(path.suffix == ".part" for path in (cache / "verdicts").iterdir())
    verdicts.folder().joinpath(verdicts._name(wanted.key)).unlink()
    assert verdicts.read(wanted.key) is None  # what was not written has been replaced


def test_two_write_one_verdict_at_a_time(monkeypatch):
    """Each has a file of its own until it is whole."""
    meet = threading.Barrier(2, timeout=30)
    replace = Path.replace

    def late(path, target):
        meet.wait()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    of = verdicts.key("fake", "sigmoid", torch.float32, META)
    verdict = verdicts.now(True, None, 0.5, of)
    writers = [threading.Thread(target=verdicts.write, args=(verdict,)) for _ in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert os.listdir(verdicts.folder()) == [verdicts._name(of)]
    assert verdicts._unwritten == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"served": true}'])
def test_a_broken_file_is_no_verdict(text):
    verdict = kept("fake")
    next(verdicts.folder().glob("*.json")).write_text(text)
    assert verdicts.read(verdict.key) is None
    assert verdicts.everything() == []


def test_a_file_of_another_key_is_no_verdict():
    verdict = kept("fake")
    other = dataclasses.replace(verdict, key=verdict.key | {"torch": "1.0"})
    next(verdicts.folder().glob("*.json")).write_text(json.dumps(dataclasses.asdict(other)))
    assert verdicts.read(verdict.key) is None


def test_nothing_is_left_beside_the_verdict():
    kept("fake")
    kept("fake", ratio=0.7)
    assert [path.suffix for path in verdicts.folder().iterdir()] == [".json"]


def test_info_shows_verdicts():
    of = verdicts.key("triton", "sigmoid", torch.float32, CPU)
    verdicts.write(verdicts.now(False, "it lies", None, of))
    stale = dataclasses.replace(verdicts.now(True, None, 0.5, of | {"torch": "1.0"}))
    verdicts.write(stale)
    text = CliRunner().invoke(main, ["info"]).output
    assert "refused: it lies" in text
    assert "of other versions, not used" in text
    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)
    said = {v["says"]: v["current"] for v in found["devices"][0]["verdicts"]}
    assert said == {"refused: it lies": True, "correct, 0.50 times the torch backend's time": False}


def test_info_shows_the_verdicts_of_a_device_alone():
    of = verdicts.key("triton", "sigmoid", torch.float32, CPU)
    old = dataclasses.replace(verdicts.now(True, None, 0.5, of), when=time.time() - 3 * 86400)
    verdicts.write(old)
    verdicts.write(verdicts.now(True, None, 0.7, of | {"device": "another"}))
    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)["devices"][0]
    assert [verdict["days"] for verdict in found["verdicts"]] == [3.0]
