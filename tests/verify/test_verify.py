"""Verdicts: what is wrong is refused with a sentence, what is right may be taken."""

import dataclasses
import json
import os
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fastsim
from fastsim.backends import get, panel, pick
from fastsim.cli.main import main
from fastsim.cli.verify import candidates, lines
from fastsim.engine.one_call import panels_alone
from fastsim.environment import variables
from fastsim.verify import cases, checks, child, run, verdicts
from fastsim.verify.canaries import canaries
from tests.verify import fakes

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered of another."""
    monkeypatch.setenv("FASTSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    monkeypatch.setattr(verdicts, "_told", set())
    monkeypatch.setattr(verdicts, "_unwritten", {})
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

    def check(backend, kind, dtype, device, precision, limit, module):
        child.main(backend, kind, str(dtype).removeprefix("torch."), str(device), precision)
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


@pytest.mark.parametrize(
    ("code", "out", "said"),
    [
        (0, "a word\n[true, null, 0.5]\n", None),
        (0, "", "its process ended without a result"),
        (0, "a word\n", "its process ended without a result"),
        (-9, "", "its process was ended by SIGKILL"),
        (-200, "", "its process was ended by signal 200"),
        (3, "[true, null, 0.5]", "its process ended with exit code 3: the last line"),
    ],
)
def test_a_process_says_how_it_ended(code, out, said, monkeypatch):
    """It is begun without what would choose a backend or verify again."""

    class Process:
        returncode = code

        def __init__(self, command, env, **_):
            assert not env.keys() & {"FASTSIM_BACKEND", "FASTSIM_VERIFY"}
            assert env["FASTSIM_CACHE"] == os.environ["FASTSIM_CACHE"]

        def communicate(self, timeout):
            return out, "a line\nthe last line\n"

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    monkeypatch.setenv("FASTSIM_BACKEND", "torch")
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    found = run._checked("fake", "sigmoid", torch.float32, CPU, "highest", 60.0, None)
    assert found == ((False, said, None) if said else (True, None, 0.5))


@pytest.mark.skipif(os.name != "posix", reason="wants groups of processes")
def test_what_a_process_has_started_ends_with_it():
    """Else its output would be waited for."""
    begin = time.monotonic()
    command = ["sh", "-c", "sleep 60 & echo; wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    process.stdout.readline()  # by now it has
    run._end(process)
    assert time.monotonic() - begin < 60


def test_a_backend_is_checked_by_what_it_has(monkeypatch):
    """A problem that needs an extra says so, and is not asked of a backend without it."""
    known = dict(fastsim.backends.__globals__["_BACKENDS"]) | {"bare": fakes.Bare()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    made = cases.problems("softmax", (5, 7, 4), torch.float32)
    asked = checks.served("bare", "softmax", (5, 7, 4), torch.float32)
    assert [one.name for one in asked] == [one.name for one in made if not one.extras]
    for one in asked:
        assert all(t.isfinite().all() for t in checks.outputs(one, "bare", CPU)) == one.finite


def test_an_error_may_be_twice_that_of_the_torch_backend(monkeypatch):
    """And two roundings of the largest entry, which of a value is 1 at least."""
    problem = cases.problems("sigmoid", (5, 7, 4), torch.float32)[0]
    right = checks.outputs(problem, "eager", CPU, torch.float64)
    theirs = 2.0**-20
    for place, exact in enumerate(right):
        largest = max(exact.abs().max().item(), 1.0 if place == 0 else 0.0)
        allowed = 2 * (theirs + torch.finfo(torch.float32).eps * largest)
        for error, wrong in ((0.99 * allowed, False), (1.01 * allowed, True), (torch.inf, True)):

            def outputs(problem, backend, device, dtype=None, error=error, place=place):
                found = [part.clone() for part in right]
                if dtype is None:
                    found[place].view(-1)[-1] += theirs if backend == "torch" else error
                return found

            monkeypatch.setattr(checks, "outputs", outputs)
            fault = checks._fault("mine", problem, torch.float32, CPU)
            wanted = "is not finite" if error == torch.inf else "is off by"
            assert wanted in fault if wrong else fault is None


def test_rows_are_weighed_apart():
    """So that a backend which takes one row's weight for another's is found out."""
    made = cases.problems("sigmoid", (5, 7, 4), torch.float32)
    problem = next(one for one in made if one.name == "of each row")
    _, grad, *_ = checks.outputs(problem, "eager", CPU, torch.float64)
    x, y = (leaf.double().requires_grad_() for leaf in problem.leaves)
    losses = fastsim.siglip(x, y, **problem.options, **problem.learnt, backend="eager")
    wanted = sum((0.5 + row / 4) * loss for row, loss in enumerate(losses))
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, x)[0])


def test_every_way_is_checked(monkeypatch):
    """In one call, in passes, and over several panels."""
    ways = set()

    def fault(*_):
        ways.add((panels_alone(), os.environ.get(panel.VARIABLE) == checks.SMALLEST))

    monkeypatch.setattr(checks, "_fault", fault)
    assert checks.faults("torch", "sigmoid", torch.float32, CPU) == []
    assert ways == {(False, False), (True, False), (False, True)}


def test_canaries_show_what_is_written_on_either_side():
    like, before = torch.zeros(3), (torch.Tensor.new_empty, torch.empty_like)
    for make in (lambda: like.new_empty(3), lambda: torch.empty_like(like)):
        for place in (-1, 3):
            with canaries() as broken:
                made = make().fill_(1.0)
                assert broken() == 0
                made.as_strided((1,), (1,), made.storage_offset() + place).fill_(1.0)
                assert broken() == 1
    assert (torch.Tensor.new_empty, torch.empty_like) == before


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


@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
def test_a_process_checks_at_the_precision_of_its_verdict(asked, precision):
    """Kernels multiply at "medium" as at "high", so that one verdict is of both."""
    precision(asked)
    verdict = checked("telling")
    assert verdict.key["precision"] == ("highest" if asked == "highest" else "high")
    assert verdict.reason == f"it multiplies at {verdict.key['precision']}"
    precision({"highest": "high", "high": "medium", "medium": "high"}[asked])
    found = verdicts.verdict("telling", "sigmoid", torch.float32, CPU)
    assert found == (None if asked == "highest" else verdict)
    assert verdicts.key("telling", "sigmoid", torch.float16, CPU)["precision"] == ""


def test_float32_is_checked_at_each_precision(monkeypatch):
    asked = []

    def check(backend, kind, dtype, device, precision, limit, module):
        asked.append((dtype, precision))
        return True, None, None

    monkeypatch.setattr(run, "_checked", check)
    known = dict(fastsim.backends.__globals__["_BACKENDS"]) | {"fake": fakes.Fake()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    monkeypatch.setattr(run, "KINDS", ("sigmoid",))
    made = list(run.everything(META, ["fake"]))
    wide, *half = torch.float32, torch.float16, torch.bfloat16
    assert asked == [(wide, "highest"), (wide, "high"), *((dtype, "") for dtype in half)]
    assert [verdict.key["precision"] for verdict in made] == [said for _, said in asked]


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


def test_what_was_not_timed_counts_as_fast_as_torch(two_kernels):
    kept("fake", ratio=None)
    assert taken() == "fake"
    kept("lying", ratio=0.9)
    assert taken() == "lying"
    of = dict.fromkeys(KEYED, "")
    found = [verdicts.now(True, None, ratio, of) for ratio in (None, 0.9, 1.1)]
    refused = verdicts.now(False, "it lies", 0.5, of)
    least, equal, most, *never = map(
        verdicts._millionths, (found[1], found[0], *found[2:], refused, None)
    )
    assert least < equal == 10**6 < most < min(never)


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


FILES = ("backends/rows.py", "losses/circle.py", "pairs/record.py", "tile.py", "engine/passes.py")


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
    monkeypatch.setattr(run, "_checked", lambda *place: (True, None, 0.5))
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
    assert "of other versions: not used" in text
    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)
    said = {v["says"]: v["current"] for v in found["devices"][0]["verdicts"]}
    assert said == {"refused: it lies": True, "right, 0.50 times the torch backend's time": False}


def test_info_shows_the_verdicts_of_a_device_alone():
    of = verdicts.key("triton", "sigmoid", torch.float32, CPU)
    old = dataclasses.replace(verdicts.now(True, None, 0.5, of), when=time.time() - 3 * 86400)
    verdicts.write(old)
    verdicts.write(verdicts.now(True, None, 0.7, of | {"device": "another"}))
    found = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)["devices"][0]
    assert [verdict["days"] for verdict in found["verdicts"]] == [3.0]


def test_the_command_checks_what_is_asked_for(two_kernels, monkeypatch):
    """And says of others why not."""
    names, reasons = candidates(META, ())
    assert names == ["fake", "lying"]
    assert [reason.partition(":")[0] for reason in reasons] == ["triton", "cuda"]
    assert candidates(META, ("lying",)) == (["lying"], [])
    monkeypatch.setattr(run, "_checked", lambda *place: (True, None, 0.5))
    monkeypatch.setattr(run, "KINDS", ("sigmoid",))
    said = [line.split(":") for line in lines("meta", ("fake",))]
    dtypes = ("float32 (highest)", "float32 (high)", "float16", "bfloat16")
    assert [" ".join(what.split()) for what, _ in said] == [f"fake sigmoid {d}" for d in dtypes]
    assert {sentence for _, sentence in said} == {" right, 0.50 times the torch backend's time"}


def test_the_kernels_under_the_interpreter(monkeypatch):
    """The whole of a check of the Triton backend, an interpreter in the place of a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    place = "triton", "squared_error", torch.float32, CPU
    verdict = run.verify(*place, limit=240.0, module="tests.verify.interpreted")
    assert verdict.served, verdict.reason
    assert verdict.ratio is None  # an interpreter has no speed
