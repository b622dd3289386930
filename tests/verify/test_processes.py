"""Checks in processes of their own: what is wrong is refused with a sentence."""

import io
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from click.testing import CliRunner

import fastsim
from fastsim.cli.main import main
from fastsim.cli.verify import checkable, lines
from fastsim.verify import checks, child, process, run, verdicts
from tests.verify import fakes

CPU = torch.device("cpu")
META = torch.device("meta")
CHECK = process.Check("fake", "sigmoid", torch.float32, CPU, "highest")


def checked(name, kind="sigmoid", limit=60.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run.verify(
            name, kind, torch.float32, CPU, limit=limit, module="tests.verify.registered"
        )


@pytest.fixture
def here(monkeypatch, capsys):
    """`checked` without a process: what a checking process does, done in this one."""

    def results(part, asked, limit, module):
        found = []
        for backend, kind, dtype, device, precision in asked:
            named = str(dtype).removeprefix("torch."), str(device), precision
            child.main(part, backend, kind, *named)
            found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
        return found

    known = fastsim.backends.__globals__["_BACKENDS"] | {fake.name: fake for fake in fakes.ALL}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    monkeypatch.setattr(run, "results", results)
    return checked


WRONG = {
    "lying": "has an error of",
    "hanging": "a step did not finish within 4 s",
    "crashing": "ended by SIGABRT",
    "raising": "illegal memory access",
    "wavering": "different results",
    "spilling": "wrote outside of",
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


TRANSIENT = {
    "memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB (info_nce)",
    "driver": "RuntimeError: Triton Error [CUDA]: Out Of Memory",
    "time": "a step did not finish within 300 s (calls)",
    "library": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    "mode": "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "compiler": "RuntimeError: Failed to find C compiler. Please specify via CC",
    "headers": "CalledProcessError: Command '['/usr/bin/gcc']' returned non-zero exit status 1.",
    "disk": "OSError: [Errno 28] No space left on device",
    "killed": "its process was ended by SIGKILL (info_nce at 16 x 32 x 64)",
}


def test_settings_of_this_process_are_not_those_of_a_check(monkeypatch):
    """Its ratio would be beside a torch backend that nobody else has."""
    for name in ("FASTSIM_BACKEND", "FASTSIM_VERIFY", "FASTSIM_COMPILE", "FASTSIM_PANEL_MB"):
        monkeypatch.setenv(name, "1")
    assert not set(process._environment(1)) & set(process.NOT_INHERITED)
    assert len(process.NOT_INHERITED) == 4


@pytest.mark.parametrize("part", ["refusal", "ratio"])
@pytest.mark.parametrize("reason", TRANSIENT)
def test_what_may_pass_is_of_this_process_alone(reason, part, two_kernels, monkeypatch):
    """Another program took the memory, or the time. A file of before stays, and is not taken."""
    place = "fake", "sigmoid", torch.float16, META
    before = verdicts.now(True, None, 0.5, verdicts.key(*place))
    verdicts.write(before)

    def results(asked, checks, limit, module=None):
        return [(TRANSIENT[reason] if asked == part else None, None) for _ in checks]

    monkeypatch.setattr(run, "results", results)
    with pytest.warns(UserWarning, match="fake is not used for sigmoid"):
        verdict = run.verify(*place)
    assert not verdict.served
    assert verdicts.verdict(*place) == verdict
    assert verdicts.everything() == [before]
    monkeypatch.setattr(verdicts, "_unwritten", {})  # as of another process
    verdicts.forget()
    assert verdicts.verdict(*place) == before


def test_what_is_right_is_served(here):
    verdict = here("fake")
    assert verdict.served, verdict.reason
    assert verdict.reason is None


@pytest.mark.parametrize(
    ("code", "out", "said"),
    [
        (0, "a word\n[null, 0.5]\n", None),
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

        def poll(self):
            return code

    monkeypatch.setattr(process.subprocess, "Popen", Process)
    monkeypatch.setenv("FASTSIM_BACKEND", "torch")
    monkeypatch.setenv("FASTSIM_VERIFY", "1")
    assert process.results("ratio", [CHECK], 60.0) == [(said, None if said else 0.5)]


@pytest.mark.parametrize(
    ("pauses", "wanted"),
    [
        ((1, 1, 1, 0), (None, 0.5)),
        ((0, 60, 0, 0), ("a step did not finish within 2.5 s (step b)", None)),
        ((0, 0, 0, 60), ("a step did not finish within 2.5 s ([null, 0.5])", None)),
    ],
)
def test_a_check_may_take_longer_than_a_step(pauses, wanted, monkeypatch):
    lines = ["step a", "step b", "step c", "[null, 0.5]"]
    code = "import time\n" + "".join(
        f"print({line!r}, flush=True); time.sleep({pause})\n"
        for line, pause in zip(lines, pauses, strict=True)
    )
    begun = subprocess.Popen

    def begin(_, **options):
        return begun([sys.executable, "-c", code], **options)

    monkeypatch.setattr(process.subprocess, "Popen", begin)
    assert process.results("refusal", [CHECK], 2.5) == [wanted]


def test_the_steps_of_a_check_are_told(here):
    told = []
    checks.refusal("fake", "sigmoid", torch.float32, CPU, told.append)
    names = [one.name for one in checks.supported("fake", "sigmoid", (5, 7, 4), torch.float32)]
    shapes = [" x ".join(map(str, shape)) for shape in checks.SMALL]
    wanted = [f"{name} at {shape}" for shape in shapes for name in names for _ in checks.PATHS]
    for shape, _ in checks.shapes_of_calls("fake", torch.float32, CPU):
        shape = " x ".join(map(str, shape))
        wanted += [f"calls of {name} at {shape}" for name in names for _ in checks.PATHS]
    assert told == [*wanted, f"{names[0]} over several panels"]


@pytest.mark.skipif(os.name != "posix", reason="wants groups of processes")
def test_processes_end_with_what_they_have_started(monkeypatch):
    """All of them, also where waiting for the first is broken off."""
    begun, waiting, begin = [], [], subprocess.Popen

    def begin_another(_, **options):
        begun.append(begin(["sh", "-c", "sleep 600 & echo a step; wait"], **options))
        return begun[-1]

    def break_off(one, limit):
        waiting.append(one)
        assert one._lines.get(timeout=60) == "a step\n"  # by now it has started something
        raise KeyboardInterrupt

    monkeypatch.setattr(process.subprocess, "Popen", begin_another)
    monkeypatch.setattr(process._Process, "result", break_off)
    with pytest.raises(KeyboardInterrupt):
        process.results("refusal", [CHECK] * 3, 60.0)
    assert [one.returncode for one in begun] == [-signal.SIGKILL] * 3
    assert waiting[0]._lines.get(timeout=60) is None  # what it has started writes no more


def test_checks_run_at_once(monkeypatch):
    """Each with its share of the cores, unless the user has said how many."""
    begun = []

    class Process:
        """Which ends once all have begun."""

        returncode = 0

        def __init__(self, command, env, **_):
            begun.append(env)
            reason = command[4]
            self.stdout = io.StringIO(f'["{reason}", null]\n')

        def wait(self, timeout):
            assert len(begun) == 3

        def poll(self):
            return 0

    monkeypatch.setattr(process.subprocess, "Popen", Process)
    monkeypatch.setattr(process, "cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    asked = [CHECK._replace(backend=name) for name in ("a", "b", "c")]
    assert process.results("refusal", asked, 60.0) == [(one.backend, None) for one in asked]
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    assert [[env[name] for name in names] for env in begun] == [["5", "2"]] * 3
    begun.clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    begun += [None, None]
    process.results("refusal", asked[:1], 60.0)
    assert not begun[2].keys() & {*names}  # alone it has them all


@pytest.fixture
def parts(monkeypatch):
    """The parts of checks that were done at once; what is named "lying" is refused, "fake" if it is
    checked beside others.
    """
    done = []

    def results(part, asked, limit, module=None):
        done.append((part, *(check.kind for check in asked)))
        wrong = {"lying", "fake"} if len(asked) > 1 else {"lying"}
        ratio = None if part == "refusal" else 0.5
        return [("it lies", None) if check.backend in wrong else (None, ratio) for check in asked]

    monkeypatch.setattr(run, "results", results)
    return done


def test_times_are_taken_when_nothing_else_runs(parts, two_kernels):
    asked = [process.Check("right", kind, torch.float16, META, "") for kind in "abc"]
    made = list(run.verdicts_of(asked, 2))
    pairs = [("refusal", "a", "b"), ("ratio", "a"), ("ratio", "b")]
    assert parts == [*pairs, ("refusal", "c"), ("ratio", "c")]
    assert [(one.key["kind"], one.served, one.ratio) for one in made] == [
        (kind, True, 0.5) for kind in "abc"
    ]


def test_what_is_refused_beside_others_is_checked_alone(parts, two_kernels):
    names = ("fake", "lying", "right")
    asked = [process.Check(name, name, torch.float16, META, "") for name in names]
    with pytest.warns(UserWarning, match="lying is not used for lying on meta: it lies"):
        made = list(run.verdicts_of(asked, 3))
    alone = [("refusal", "fake"), ("ratio", "fake"), ("refusal", "lying"), ("ratio", "right")]
    assert parts == [("refusal", *names), *alone]
    assert [one.served for one in made] == [True, False, True]
    assert [verdicts.read(one.key) for one in made] == made


@pytest.mark.parametrize(
    ("free", "most"), [(80 << 30, 16), (30 << 30, 10), (4 << 30, 1), (1 << 30, 1)]
)
def test_so_many_checks_as_the_machine_can_run(free, most, monkeypatch):
    monkeypatch.setattr(run, "cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 90 << 30))
    assert run.most_at_once(torch.device("cuda", 1)) == most
    assert run.most_at_once(CPU) == 16


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
    known = dict(fastsim.backends.__globals__["_BACKENDS"]) | {"fake": fakes.Fake()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    asked = [(c.dtype, c.precision) for c in run.checks_of(META, ["fake"], ["sigmoid"])]
    wide, *half = torch.float32, torch.float16, torch.bfloat16
    assert asked == [(wide, "highest"), (wide, "high"), *((dtype, "") for dtype in half)]


def test_the_command_checks_what_is_asked_for(two_kernels, parts, monkeypatch):
    """And says of others why not."""
    names, reasons = checkable(META, ())
    assert names == ["fake", "lying"]
    assert [reason.partition(":")[0] for reason in reasons] == ["triton", "cuda"]
    assert checkable(META, ("lying",)) == (["lying"], [])
    monkeypatch.setattr(run, "KINDS", ("sigmoid",))
    first, *others = lines("meta", ("fake",), jobs=3)
    assert first == "4 checks, 3 at a time"
    assert [len(kinds) for part, *kinds in parts if part == "refusal"][:1] == [3]
    said = [line.split(":") for line in others]
    dtypes = ("float32 (highest)", "float32 (high)", "float16", "bfloat16")
    assert [" ".join(what.split()) for what, _ in said] == [f"fake sigmoid {d}" for d in dtypes]
    assert {sentence for _, sentence in said} == {" correct, 0.50 times the torch backend's time"}


def test_the_command_checks_some_kinds_and_dtypes(two_kernels, monkeypatch):
    asked = []

    def verdicts_of(checks, jobs):
        assert jobs == 3
        asked.extend(check[:3] for check in checks)
        return ()

    monkeypatch.setattr(run, "verdicts_of", verdicts_of)
    options = ["--kind", "levels", "--kind", "sigmoid", "--dtype", "bfloat16"]
    done = CliRunner().invoke(main, ["verify", "--device", "meta", "--jobs", "3", *options])
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
