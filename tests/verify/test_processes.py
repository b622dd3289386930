"""Checks in processes of their own: what is wrong is refused with a sentence."""

import io
import json
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch
from click.testing import CliRunner

import fastsim
from fastsim.cli.main import main
from fastsim.cli.verify import candidates, lines
from fastsim.verify import checks, child, run, verdicts
from tests.verify import fakes

CPU = torch.device("cpu")
META = torch.device("meta")


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
    "hanging": "a step did not finish within 4 s",
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


def test_what_is_right_is_served(here):
    verdict = here("fake")
    assert verdict.served, verdict.reason
    assert verdict.reason is None


@pytest.mark.parametrize(
    ("code", "out", "said"),
    [
        (0, "a word\n[true, null, 0.5]\n", None),
        (0, "", "its process ended without a result"),
        (0, "a word\n", "its process ended without a result (a word)"),
        (-9, "", "its process was ended by SIGKILL"),
        (-200, "", "its process was ended by signal 200"),
        (3, "a step\n", "its process ended with exit code 3: the last line (a step)"),
    ],
)
def test_a_process_says_how_it_ended(code, out, said, monkeypatch):
    """It is begun without what would choose a backend or verify again."""

    class Process:
        returncode = code

        def __init__(self, command, env, stderr, **_):
            assert not env.keys() & {"FASTSIM_BACKEND", "FASTSIM_VERIFY"}
            assert env["FASTSIM_CACHE"] == os.environ["FASTSIM_CACHE"]

            self.stdout = io.StringIO(out)
            stderr.write("a line\nthe last line\n")

        def wait(self, timeout):
            pass

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    monkeypatch.setenv("FASTSIM_BACKEND", "torch")
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    found = run._checked("fake", "sigmoid", torch.float32, CPU, "highest", 60.0, None)
    assert found == ((False, said, None) if said else (True, None, 0.5))


@pytest.mark.parametrize(
    ("pauses", "wanted"),
    [
        ((1, 1, 1, 0), (True, None, 0.5)),
        ((0, 60, 0, 0), (False, "a step did not finish within 2.5 s (step b)", None)),
        ((0, 0, 0, 60), (False, "a step did not finish within 2.5 s ([true, null, 0.5])", None)),
    ],
)
def test_a_check_may_take_longer_than_a_step(pauses, wanted, monkeypatch):
    lines = ["step a", "step b", "step c", "[true, null, 0.5]"]
    code = "import time\n" + "".join(
        f"print({line!r}, flush=True); time.sleep({pause})\n"
        for line, pause in zip(lines, pauses, strict=True)
    )
    begun = subprocess.Popen

    def begin(_, **options):
        return begun([sys.executable, "-c", code], **options)

    monkeypatch.setattr(run.subprocess, "Popen", begin)
    assert run._checked("fake", "sigmoid", torch.float32, CPU, "highest", 2.5, None) == wanted


def test_the_steps_of_a_check_are_told(here):
    told = []
    checks.verdict("fake", "sigmoid", torch.float32, CPU, told.append)
    names = [one.name for one in checks.served("fake", "sigmoid", (5, 7, 4), torch.float32)]
    shapes = [" x ".join(map(str, shape)) for shape in checks.SMALL]
    wanted = [f"{name} at {shape}" for shape in shapes for name in names for _ in checks.WAYS]
    assert told == [*wanted, *["calls"] * len(checks.WAYS), f"{names[0]} over several panels"]


@pytest.mark.skipif(os.name != "posix", reason="wants groups of processes")
def test_what_a_process_has_started_ends_with_it():
    """Else its output would not end."""
    begin = time.monotonic()
    command = ["sh", "-c", "sleep 60 & echo; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    with process.stdout as said:
        said.readline()  # by now it has
        run._end(process)
        assert said.read() == b""
    assert time.monotonic() - begin < 60


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
    made = list(run.everything(META, ["fake"], ["sigmoid"]))
    wide, *half = torch.float32, torch.float16, torch.bfloat16
    assert asked == [(wide, "highest"), (wide, "high"), *((dtype, "") for dtype in half)]
    assert [verdict.key["precision"] for verdict in made] == [said for _, said in asked]


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


def test_the_command_checks_some_kinds_and_dtypes(two_kernels, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "_checked", lambda *place: asked.append(place[:3]) or (True, None, 1))
    options = ["--kind", "levels", "--kind", "sigmoid", "--dtype", "bfloat16"]
    done = CliRunner().invoke(main, ["verify", "--device", "meta", *options])
    assert done.exit_code == 0, done.output
    wanted = [(name, kind, torch.bfloat16) for name in ("fake", "lying") for kind in options[1:4:2]]
    assert asked == wanted
    done = CliRunner().invoke(main, ["verify", "--device", "meta", "--kind", "info_nce"])
    assert done.exit_code != 0
    assert "--kind: wanted one of softmax, sigmoid, " in done.output


def test_the_kernels_under_the_interpreter(monkeypatch):
    """The whole of a check of the Triton backend, an interpreter in the place of a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    place = "triton", "squared_error", torch.float32, CPU
    verdict = run.verify(*place, limit=240.0, module="tests.verify.interpreted")
    assert verdict.served, verdict.reason
    assert verdict.ratio is None  # an interpreter has no speed
