"""Verdicts: what is wrong is refused with a sentence, what is right may be taken."""

import dataclasses
import json
import warnings

import pytest
import torch
from click.testing import CliRunner

import fastsim
from fastsim.backends import get, panel, pick
from fastsim.cli.main import main
from fastsim.environment import variables
from fastsim.verify import cases, checks, child, run, verdicts
from tests.verify import fakes

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered of another."""
    monkeypatch.setenv("FASTSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    monkeypatch.setattr(verdicts, "_told", set())
    return tmp_path


def checked(name, kind="sigmoid", limit=60.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run.verify(
            name, kind, torch.float32, CPU, limit=limit, module="tests.verify.registered"
        )


@pytest.fixture
def here(monkeypatch, capsys):
    """`checked` without a process: what a checking process does, done in this one."""

    def check(backend, kind, dtype, device, limit, module):
        child.main(backend, kind, str(dtype).removeprefix("torch."), str(device))
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    known = fastsim.backends.__globals__["_BACKENDS"] | {fake.name: fake for fake in fakes.ALL}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    monkeypatch.setattr(run, "_checked", check)
    return checked


WRONG = {
    "lying": "is off by",
    "hanging": "did not finish within 4 s",
    "crashing": "ended by SIGABRT",
    "raising": "illegal memory access",
    "wavering": "different bits",
    "spilling": "wrote outside",
    "deaf": "a NaN did not reach the loss",
}


# Whose processes end without a word, or not at all; and one whose process speaks.
BY_PROCESS = ("hanging", "crashing", "lying")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name, request):
    check = checked if name in BY_PROCESS else request.getfixturevalue("here")
    verdict = check(name, limit=4.0 if name == "hanging" else 60.0)
    assert not verdict.served
    assert WRONG[name] in verdict.reason
    assert verdicts.read(verdict.key) == verdict
    assert WRONG[name] in verdict.sentence


def test_a_backend_is_checked_by_what_it_has(monkeypatch):
    """A problem that needs an extra says so, and is not asked of a backend without it."""
    known = dict(fastsim.backends.__globals__["_BACKENDS"]) | {"bare": fakes.Bare()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    made = cases.problems("softmax", (5, 7, 4), torch.float32)
    asked = checks.served("bare", "softmax", (5, 7, 4), torch.float32)
    assert [one.name for one in asked] == [one.name for one in made if not one.extras]
    for one in asked:
        assert all(t.isfinite().all() for t in checks.outputs(one, "bare", CPU)) == one.finite


def test_what_is_right_is_served(here):
    verdict = here("fake")
    assert verdict.served, verdict.reason
    assert verdict.reason is None


@pytest.mark.parametrize("name", ["torch", "triton", "cuda"])
def test_several_panels_are_several(name):
    pytest.importorskip("triton")
    rows, columns, _ = checks.TALL
    with variables({panel.VARIABLE: checks.SMALLEST}):
        blocks = get(name).blocks(rows, columns, CPU)
        whole = get(name).blocks(rows, columns, CPU, whole_rows=True)
        assert min(len(list(blocks)), len(list(whole))) > 2


def test_the_shapes_on_a_device(monkeypatch):
    """More tiles than two for each multiprocessor; 1, 4, 5, 12 and 13 steps in depth."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = checks.shapes(torch.device("cuda:0"))
    assert max((rows // 128) * (columns // 128) for rows, columns, _ in found) > 2 * 132
    assert {1, 4, 5, 12, 13} <= {depth // 64 for _, _, depth in found if depth % 64 == 0}
    assert any(rows % 128 == columns % 128 == 0 for rows, columns, _ in found)
    assert any(rows % 8 and columns % 8 and depth % 64 for rows, columns, depth in found)


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


@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_cases_of_every_kind(kind):
    """The torch backend is right by its own checks, in this process."""
    assert checks.faults("torch", kind, torch.float32, CPU) == []


def test_every_kind_with_kernels_has_cases():
    kernels = {kind for name in ("triton", "cuda") for kind in _kinds(name)}
    assert kernels <= set(cases.KINDS)


def _kinds(name):
    try:
        return get(name).kinds()
    except ImportError:
        return ()


def kept(name, *, served=True, ratio=0.5, kind="sigmoid", dtype=torch.float32):
    of = verdicts.key(name, kind, dtype, META)
    verdict = verdicts.now(served, None if served else "it lies", ratio, of)
    verdicts.write(verdict)
    return verdict


def taken(kind="sigmoid", dtype=torch.float32):
    return pick(None, torch.empty(2, 2, device="meta", dtype=dtype), kind=kind).name


@pytest.fixture
def two_kernels(monkeypatch):
    """Two backends that serve meta tensors, as triton and cuda serve a GPU's."""
    known = dict(fastsim.backends.__globals__["_BACKENDS"])
    known |= {"fake": fakes.Fake(), "lying": fakes.Lying()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)


def test_auto_takes_the_fastest_that_is_right(two_kernels):
    kept("fake", ratio=0.5)
    kept("lying", ratio=0.4)
    assert taken() == "lying"
    kept("lying", served=False, ratio=None)
    assert taken() == "fake"
    kept("fake", ratio=1.5)
    with pytest.warns(UserWarning, match="it lies"):
        assert taken() == "torch"


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"served": true}'])
def test_a_broken_file_is_no_verdict(text):
    verdict = kept("fake")
    next(verdicts.folder().glob("*.json")).write_text(text)
    assert verdicts.read(verdict.key) is None
    assert verdicts.everything() == []


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
    assert "of other versions: not used" in text
    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)
    said = {v["says"]: v["current"] for v in found["devices"][0]["verdicts"]}
    assert said == {"refused: it lies": True, "right, 0.50 times the torch backend's time": False}


def test_the_kernels_under_the_interpreter(monkeypatch):
    """The whole of a check of the Triton backend, an interpreter in the place of a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    place = "triton", "squared_error", torch.float32, CPU
    verdict = run.verify(*place, limit=240.0, module="tests.verify.interpreted")
    assert verdict.served, verdict.reason
    assert verdict.ratio is None  # an interpreter has no speed
