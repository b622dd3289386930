"""fastsim bench: what it measures is what it says, and what cannot be is a row that says so."""

import contextlib
import itertools
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastsim
from fastsim.benchmark import (
    ceilings,
    compare,
    memory,
    processes,
    progress,
    results,
    tables,
    timing,
)
from fastsim.benchmark import run as run_module
from fastsim.benchmark.accuracy import errors, relative
from fastsim.benchmark.baselines import BASELINES, baseline_named, ours
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import reason, step
from fastsim.benchmark.cases import CASES, DIMS, SIZES
from fastsim.benchmark.found import Found
from fastsim.benchmark.processes import joined
from fastsim.benchmark.run import Session, run
from fastsim.benchmark.settings import Settings

ROWS, WIDTH = 24, 10
PAIRS = [(baseline, loss) for baseline in BASELINES.values() for loss in baseline.losses]


def tiny(**options):
    kept = {"sizes": (8, 16), "dims": (6,), "seconds": 0.01, "measures": ("time",)}
    return run(Settings(**kept | options), progress=False)


# ---- what is measured ----


def test_every_loss_is_measured():
    losses = {*fastsim.losses.SPECIFICATIONS, fastsim.angle, fastsim.triplet_margin}
    losses -= {fastsim.late_interaction}  # of sets of tokens: python -m bench.late_interaction
    assert losses <= {case.function for case in CASES.values()}
    assert set(BASELINES["eager torch"].losses) == set(CASES)


@pytest.mark.parametrize(("baseline", "loss"), PAIRS, ids=lambda part: getattr(part, "name", part))
def test_a_baseline_computes_the_same_loss(baseline, loss):
    if baseline.name == "torch.compile":
        pytest.skip("compiling takes longer than all the other tests; its formula is eager's")
    problem = CASES[loss].problem(ROWS, WIDTH, dtype=torch.float64, seed=torch.seed() % 2**31)
    try:
        found = errors(baseline.call(problem), problem)
    except UnavailableError as error:
        pytest.skip(f"{baseline.name}: {error}")
    # Sums of so many terms, of logits up to 20.
    rounding = 20 * ROWS * WIDTH * torch.finfo(torch.float64).eps
    # Some take torch's softplus, which leaves out log(1 + exp(-x)) from x = 20 on.
    assert max(found.values()) < rounding + math.exp(-20)


def test_the_same_inputs_for_all():
    first, second = (CASES["siglip"].problem(ROWS, WIDTH) for _ in range(2))
    assert all(map(torch.equal, first.leaves, second.leaves))
    other = CASES["siglip"].problem(ROWS, WIDTH, seed=1)
    assert not torch.equal(first.leaves[0], other.leaves[0])


def planned(settings):
    """{(measure, loss, N, D)} of the steps of a run."""
    session = Session(settings)
    return {
        (step.function.__name__, step.arguments[0].name, *step.size)
        for step in session.steps()
        if step.function in (session.time, session.memory)
    }


def test_the_default_run_covers_all_sizes():
    steps = planned(Settings())
    headlines = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")
    places = itertools.product(headlines, SIZES, DIMS)
    assert {("time", *place) for place in places} <= steps
    assert {loss for _, loss, *_ in steps} == set(CASES)
    tile = [name for name, case in CASES.items() if case.products[1]]
    assert {("memory", name, 2048, DIMS[0]) for name in tile} <= steps
    # One matrix alone is beyond the limit there.
    (beyond,) = (
        n
        for measure, _, n, _ in steps
        if (measure, n > max(SIZES)) == ("memory", True) and n < 10**5
    )
    assert 4 * beyond**2 >= Settings().bytes_limit


def test_a_quick_run_is_small_and_whole():
    steps = planned(Settings(quick=True))
    assert {loss for measure, loss, *_ in steps if measure == "time"} == set(CASES)
    assert {n for _, _, n, _ in steps} == {64, 512, 2048}


def test_settings_refuse_what_there_is_not():
    with pytest.raises(ValueError, match=r"loss: wanted one of info_nce, .*, got 'nce'"):
        Settings(losses=("nce",))
    with pytest.raises(ValueError, match="baseline: wanted one of"):
        Settings(baselines=("open-clip",))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU is visible"):
            Settings(device="cuda")


# ---- how ----


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a function says so; returns that function."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    return spend


def test_baselines_take_turns(clock):
    calls = []

    def taking(name, seconds):
        def function():
            calls.append(name)
            clock(3.0 if calls.count(name) == 1 else seconds)  # a warm-up is slow

        return function

    found = timing.in_turns({"a": taking("a", 0.5), "b": taking("b", 2.0)}, seconds=4.0)
    assert "".join(calls) == "ab" + "abab" + "aa"  # b goes no further than its two rounds
    assert found == {"a": [0.5] * 4, "b": [2.0] * 2}


def test_a_function_that_fails_is_a_sentence(clock):
    def failing():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")

    found = timing.in_turns({"a": lambda: clock(1.0), "b": failing}, seconds=0.0, most=3)
    assert found == {"a": [1.0, 1.0], "b": "out of memory"}
    assert reason(ValueError("one\ntwo")) == "ValueError: one"
    assert reason(UnavailableError("no")) == "no"


def test_a_summary_keeps_the_best_of_each_part():
    row = timing.summary([5e-3, 4e-3, 3e-3, 7e-3, 9e-3, 8e-3])
    assert row == {"repeats ms": [4.0, 3.0, 8.0], "median ms": 6.0, "rounds": 6}


def test_no_memory_is_a_sentence_of_its_own():
    for error in (MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("not enough memory")):
        assert reason(error) == "out of memory"


def test_ceilings_are_rates_of_what_was_done(monkeypatch):
    """Bytes read and written, exponentials, and the operations of three products."""

    def in_turns(functions, **_):
        return {name: [2e-4, 1e-4] for name in functions}

    monkeypatch.setattr(ceilings, "in_turns", in_turns)
    monkeypatch.setattr(ceilings, "PANEL", {"cpu": (300, 200)})
    copy, exp = ceilings.machine_rows()
    products = ceilings.product_rows(96, 64)
    # Written with three digits after the point, those of products with two.
    assert copy["GB/s"] == pytest.approx(2 * 4 * 2**26 / 1e-4 / 1e9, abs=1e-3)
    assert exp["G/s"] == pytest.approx(300 * 200 / 1e-4 / 1e9, abs=1e-3)
    assert products["GFLOP/s"] == pytest.approx(3 * 2 * 96 * 96 * 64 / 1e-4 / 1e9, abs=1e-2)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_bare_products_are_as_many_as_those_of_a_loss(count, monkeypatch):
    """Over panels, of which the last is lower: operations are counted where torch makes them."""
    monkeypatch.setattr(ceilings, "BAND", {"cpu": 10})
    run = ceilings.bare_products(24, 6, count=count)
    with Products() as made:
        run()
    assert made.operations == count * 2 * 24 * 24 * 6


class Products(TorchDispatchMode):
    """Counts the operations of products."""

    operations = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.__name__.split(".")[0] in ("mm", "addmm_"):
            left, right = arguments[-2:]
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*arguments, **(options or {}))


def test_peak_memory():
    rows, matrix = 2048, 2048**2 * 4 / 2**20
    eager = memory.rise("info_nce", "eager torch", rows, 16)
    # Scores, their softmax and its gradient; not more than a formula could hold at once.
    assert 2 * matrix < eager < 8 * matrix
    assert memory.rise("info_nce", "eager torch", rows, 16, limit=int(matrix * 2**20)) == (
        "out of memory"
    )


def test_a_rise_leaves_out_the_gradients(monkeypatch, tmp_path):
    marks = iter([10**6, 10**6 + 5000])
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear")
    monkeypatch.setattr(memory, "_high_water_mark", lambda: next(marks))
    problem = CASES["siglip"].problem(8, 4)
    gradients = 2 * 8 * 4 * 4
    assert memory.resident_rise(ours("eager").call(problem), problem) == 5000 - gradients


def test_memory_is_limited_within_a_block_alone():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(ZeroDivisionError), memory.limited(2**40):
        within = resource.getrlimit(resource.RLIMIT_DATA)
        raise ZeroDivisionError
    assert (within != before) == memory._STATM.exists()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(("held", "limit"), [(8, 6.4), (20, 16.0), (64, 16.0)])
def test_the_usual_limit_leaves_a_fifth(held, limit, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": held * 2**18, "SC_PAGE_SIZE": 2**12}.get)
    assert memory.usual_limit() == limit


def test_an_error_is_relative_to_float64():
    problem = CASES["info_nce"].problem(ROWS, WIDTH, dtype=torch.float64)
    exact = ours("eager").call(problem)
    assert errors(exact, problem) == {"loss error": 0.0, "gradient error": 0.0}
    off = errors(lambda *leaves: exact(*leaves) * 1.01, problem)
    assert off["loss error"] == pytest.approx(0.01)
    assert off["gradient error"] == pytest.approx(0.01)
    assert relative(torch.ones(4), torch.zeros(4)) == 2.0
    tiny = torch.full((4,), 1e-30)  # its squares are none
    assert relative(2 * tiny, tiny) == pytest.approx(1.0)


# ---- a run ----


def test_a_run_has_a_row_for_everything(tmp_path):
    names = ("eager torch", "siglip-kernel")
    about, rows = tiny(losses=("siglip",), baselines=names, measures=("time", "error"))
    results.write(tmp_path / "run.jsonl", about, rows)
    kept = json.loads(json.dumps([about, rows]))
    assert list(results.read(tmp_path / "run.jsonl")) == kept
    assert about["versions"]["torch"] == torch.__version__
    assert kept[0]["settings"]["sizes"] == [8, 16]
    found = Found(about, rows)
    mine = found.ours("siglip", 16, 6)
    for name in (mine, "eager torch"):
        for n in (8, 16):
            for which in ("forward", "forward + backward"):
                assert found.best("siglip", name, n, 6, which) > 0
    absent = [row for row in rows if row.get("implementation") == "siglip-kernel"]
    assert [set(row) & {"repeats ms", "not measured"} for row in absent] == [{"not measured"}]
    wrong = [row for row in rows if row["measure"] == "error"]
    assert {row["implementation"] for row in wrong} == {mine, "eager torch"}
    text = tables.text(about, rows)
    assert "siglip, 16 x 6" in text
    assert absent[0]["not measured"] in text


def test_a_table_by_hand():
    """Forward, both passes, ratio to fastsim's with its spread, share of the ceiling, memory."""
    about, rows = pretended(fastsim_cpu=[2.5, 2.0], open_clip=[6.0, 6.5])
    rows += [row | {"pass": "forward", "repeats ms": [min(row["repeats ms"]) / 2]} for row in rows]
    place = {"loss": "siglip", "rows": 64, "width": 8, "implementation": "fastsim cpu"}
    rows.append(place | {"measure": "memory", "rise MB": 12.34})
    # Three products of 64 x 64 x 8 in 2 ms are a quarter of this.
    rate = 3 * 2 * 64 * 64 * 8 / 2e-3 / 1e9 * 4
    rows.append({"measure": "ceiling", "name": "products", "rows": 64, "width": 8, "GFLOP/s": rate})
    lines = [" ".join(line.split()) for line in tables.text(about, rows).splitlines()]
    assert "fastsim cpu 1.000 2.000 1.00 25% 12.3" in lines
    assert "open clip 3.000 6.000 3.00 2.40 to 3.25 8%" in lines


def test_the_version_of_torch_is_that_of_its_build(monkeypatch):
    monkeypatch.setattr(results.metadata, "version", lambda package: "2.0")
    versions = results.environment()["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["triton"] == "2.0"


@pytest.mark.parametrize("unit", ["amx", "avx512_bf16", ""])
def test_a_device_says_which_instructions_are_in_use(unit, monkeypatch, usable):
    """One model of a processor comes with and without a matrix unit; the folders differ."""
    usable("cpu")
    monkeypatch.setattr(results.amx, "name", lambda: unit)
    monkeypatch.setattr(results.amx, "is_matrix_unit", lambda: unit == "amx")
    found = "amx" if unit == "amx" else torch.ops.fastsim_cpu.instruction_set()
    assert results.device_name().endswith(f"-x{torch.get_num_threads()}-{found}")
    assert results.environment()["device"] == results.device_name()


def test_a_device_without_kernels_has_the_instructions_of_torch(monkeypatch):
    monkeypatch.setattr(type(results.get("cpu")), "unsupported_reason", lambda self: "not built")
    name = results.device_name()
    assert name.endswith(f"-{torch.backends.cpu.get_cpu_capability().lower()}")


def test_a_share_of_the_ceiling():
    case = CASES["info_nce"]
    about, rows = tiny(losses=("info_nce",), baselines=("none",))
    found = Found(about, rows)
    rate = next(r for r in rows if r.get("name") == "products" and r["rows"] == 16)["GFLOP/s"]
    name = found.ours("info_nce", 16, 6)
    seconds = found.best("info_nce", name, 16, 6) / 1e3
    assert case.flop(16, 6) == 3 * 2 * 16 * 16 * 6
    assert found.share(case, name, 16, 6) == pytest.approx(3072 * 3 / seconds / (1e9 * rate))


def test_a_call_that_would_take_too_long_is_not_made():
    _, rows = tiny(losses=("info_nce",), baselines=("eager torch",), limit=0.0)
    rows = [row for row in rows if row["measure"] == "time" and "loss" in row]
    assert all("repeats ms" in row for row in rows if row["rows"] == 8 and "pass" in row)
    late = [row["not measured"] for row in rows if row["rows"] == 16]
    assert len(late) == 2
    assert all("beyond the limit of 0" in why for why in late)


def test_a_time_is_foretold_by_the_scores():
    """A loss over N x N scores takes the square of N, one over a list N."""
    session = Session(Settings(limit=3.0))
    for name, wanted in (("info_nce", 0.5 * 3**2), ("cosent", 0.5 * 3)):
        case = CASES[name]
        assert session._foretold(case, "eager torch", 24, 6) is None
        session.taken[name, "eager torch", 6] = 8, 0.5
        assert session._foretold(case, "eager torch", 24, 6) == wanted
        late = session._too_long(case, BASELINES["eager torch"], 24, 6)
        assert (late is None) == (wanted <= 3.0)


def test_what_failed_is_not_tried_with_more_rows():
    """The smallest that failed counts, whichever was tried first: memory is measured by itself."""
    session, case, peer = Session(Settings()), CASES["info_nce"], BASELINES["eager torch"]
    for rows in (512, 64, 2048):
        session._note_failure(case, peer.name, rows, f"failed at {rows}")
    assert session._left_out(case, peer, 63) is None
    for rows in (64, 65, 512):
        assert session._left_out(case, peer, rows).startswith("failed at")
    assert session._left_out(CASES["siglip"], peer, 512) is None


def test_a_call_that_takes_long_is_made_once_in_each_process(monkeypatch):
    asked = []

    def in_turns(functions, *, fewest, warm_up, **_):
        asked.append((fewest, warm_up))
        return {name: [0.5] for name in functions}

    monkeypatch.setattr(run_module, "in_turns", in_turns)
    for count in (1, 4):
        session = Session(Settings(processes=count))
        for seconds in (0.2, 0.3):  # of twice the rows: 0.8 and 1.2
            session.taken["siglip", "eager torch", 6] = 8, seconds
            session._timed(CASES["siglip"], 16, 6, "forward", {"eager torch": None})
    assert asked == [(2, True), (2, False), (2, True), (1, False)]


def test_large_matrices_are_timed_both_ways_at_once(monkeypatch):
    """Beyond 2,048 rows no forward pass alone, but of a list, which costs little."""
    session, asked = Session(Settings(baselines=("none",), backends=("torch",))), []
    monkeypatch.setattr(session, "_timed", lambda case, n, d, which, _: asked.append(which) or [])
    for name, rows, width in (("siglip", 2048, 2), ("siglip", 2049, 2), ("cosent", 2049, 1)):
        session.time(CASES[name], rows, width)
    both = ["forward", "forward + backward"]
    assert asked == [*both, both[1], *both]


def test_a_rate_is_of_the_products_of_its_pass(monkeypatch):
    monkeypatch.setattr(run_module, "in_turns", lambda functions, **_: {"eager torch": [0.5]})
    session, case = Session(Settings()), CASES["siglip"]
    for which, count in (("forward", 1), ("forward + backward", 3)):
        (row,) = session._timed(case, 80, 60, which, {"eager torch": None})
        assert row["GFLOP/s"] == pytest.approx(count * 2 * 80 * 80 * 60 / 0.5 / 1e9, rel=1e-4)
    assert session.taken == {("siglip", "eager torch", 60): (80, 0.5)}


def test_an_error_is_that_of_a_size_which_can_be_afforded():
    few = replace(CASES["siglip"], exact=12)
    for sizes, rows in (((), 12), ((8,), 8), ((8, 16), 12)):
        session = Session(Settings(baselines=("none",), backends=("torch",), sizes=sizes))
        assert [row["rows"] for row in session.error(few, {})] == [rows]


def test_a_quick_run_leaves_out_what_is_slow():
    quick, compiled = Settings(quick=True), BASELINES["torch.compile"]
    assert quick.left_out(compiled, 64) == "left out of a quick run"
    assert replace(quick, baselines=("torch.compile",)).left_out(compiled, 64) is None
    assert (quick.pass_seconds, Settings().pass_seconds) == (0.2, 0.5)
    assert replace(quick, seconds=0.1).pass_seconds == 0.1
    peer = replace(BASELINES["eager torch"], up_to=100)
    assert [Settings().left_out(peer, rows) is None for rows in (100, 101)] == [True, False]
    assert Settings(sizes=(101,)).left_out(peer, 101) is None


def test_what_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = CASES["siglip"].problem(2, 2)
    with pytest.raises(UnavailableError, match="open_clip is not installed"):
        BASELINES["open_clip"].call(problem)


def test_a_backend_that_cannot_says_why():
    problem = CASES["siglip"].problem(2, 2)
    why = fastsim.backends()["triton"]
    if why is None:
        pytest.skip("triton is usable here")
    with pytest.raises(UnavailableError) as caught:
        baseline_named("fastsim triton").call(problem)
    assert str(caught.value) == why


# ---- a repeated run ----


def pretended(**times):
    """A run of one loss: {implementation: repeats}."""
    about = {"device": "d", "kind": "cpu", "versions": {}, "commit": "c", "settings": {}}
    place = {"loss": "siglip", "rows": 64, "width": 8, "pass": "forward + backward"}
    return about, [
        {"measure": "time", "implementation": name.replace("_", " "), **place, "repeats ms": t}
        for name, t in times.items()
    ]


def test_a_repeated_run_that_agrees():
    first = pretended(fastsim_cpu=[1.0, 1.2], open_clip=[2.0, 2.1])
    assert compare.changed(compare.shared(first, first)) == []
    # Twice as slow a machine: the ratio is the same.
    found = compare.shared(first, pretended(fastsim_cpu=[2.0], open_clip=[4.1]))
    assert compare.changed(found) == []
    assert compare.text(found) == "0 of 1 ratios changed by more than their spread"


def test_a_repeated_run_that_does_not():
    first = pretended(fastsim_cpu=[1.0, 1.2], open_clip=[2.0, 2.1])
    second = pretended(fastsim_cpu=[1.0, 1.1], open_clip=[3.0, 3.1])
    found = compare.shared(first, second)
    ((place, before, after),) = compare.changed(found)
    assert place == ("siglip", "open clip", 64, 8, "forward + backward")
    assert before == pytest.approx((2.0, 2.0 / 1.2, 2.1))
    assert after == pytest.approx((3.0, 3.0 / 1.1, 3.1))
    assert "2.00 (1.67 to 2.10), now 3.00 (2.73 to 3.10)" in compare.text(found)
    assert [place for place, *_ in compare.changed(compare.shared(second, first))] == [place]
    with pytest.raises(ValueError, match="against: wanted a run"):
        compare.shared(first, pretended(fastsim_cpu=[1.0]))


# ---- several processes ----


def test_processes_are_joined():
    place = {"measure": "time", "loss": "siglip", "rows": 64, "pass": "forward"}
    ours, theirs = (place | {"implementation": name} for name in ("fastsim cpu", "open_clip"))
    first = {"repeats ms": [2.0, 1.0], "median ms": 9.0, "rounds": 7, "GFLOP/s": 3.0}
    second = {"repeats ms": [0.5, 0.7], "median ms": 8.0, "rounds": 5, "GFLOP/s": 6.0}
    late = place | {"implementation": "inf-cl", "not measured": "a call would take too long"}
    rows = joined(
        [
            [ours | first, late, theirs | {"not measured": "out of memory"}],
            [theirs | second, ours | second],
            [late],
        ]
    )
    both = {"repeats ms": [1.0, 0.5], "rounds": 12, "GFLOP/s": 6.0}
    alone = {"repeats ms": [0.5], "rounds": 5, "GFLOP/s": 6.0}
    assert rows == [ours | both, late, theirs | alone]


def test_a_run_in_processes(monkeypatch, capfd):
    kept = {"sizes": (8,), "dims": (6,), "losses": ("siglip",), "baselines": ("eager torch",)}
    settings = Settings(**kept, measures=("time", "error"), seconds=0.01, processes=2)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "12345")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    first, second = processes.run_in_processes(settings)
    assert "process 2 of 2" in capfd.readouterr().err
    assert (os.environ["MALLOC_TRIM_THRESHOLD_"], os.environ.get("MALLOC_TOP_PAD_")) == (
        "12345",
        None,
    )
    for count, (about, rows) in enumerate((first, second), 1):
        assert about["settings"]["processes"] == 2
        assert about["allocator"] == processes.ALLOCATOR
        times = [row for row in rows if "repeats ms" in row]
        assert {len(row["repeats ms"]) for row in times} == {count}
        names = [row["implementation"] for row in times if row["measure"] == "time"]
        assert names == ["fastsim cpu", "eager torch"] * 2
        assert len([row for row in rows if row["measure"] == "error"]) == 2


def test_later_processes_leave_out_the_largest(monkeypatch):
    asked = []

    class Pool:
        def __init__(self, *_):
            asked.append(os.environ["MALLOC_TOP_PAD_"])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, settings, *, progress):
            asked.append(settings)
            return self

        def result(self):
            return {}, []

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    settings = Settings(processes=5, measures=("time",))
    assert [rows for _, rows in processes.run_in_processes(settings, progress=False)] == [[]] * 5
    whole, few = asked[1::2][:4], asked[1::2][4:]
    assert asked[::2] == [processes.ALLOCATOR["MALLOC_TOP_PAD_"]] * 5
    assert [s.sizes_of(CASES["info_nce"]) for s in whole] == [SIZES] * 4
    (last,) = few
    assert last.sizes_of(CASES["info_nce"]) == (64, 512, 2048)
    assert last.sizes_of(CASES["cosent"]) == CASES["cosent"].sizes  # there is no matrix


def test_a_log_gets_lines(capsys, monkeypatch):
    steps = [(1, "small", "a"), (3, "large", "b")]
    monkeypatch.setattr(progress, "SECONDS", 0)
    assert list(progress.shown(steps)) == steps
    assert capsys.readouterr().err == "  0%  small\n 25%  large\n"
    assert list(progress.shown(steps, visible=False)) == steps
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    assert list(progress.shown(steps)) == steps
    assert "100%" in capsys.readouterr().err


def test_a_step_leaves_fresh_gradients():
    problem = CASES["siglip"].problem(4, 4)
    call = ours("eager").call(problem)
    step(call, problem)
    first = problem.leaves[0].grad.clone()
    step(call, problem)
    assert torch.equal(problem.leaves[0].grad, first)


# ---- the command ----


def test_the_command(tmp_path):
    runner = pytest.importorskip("click.testing").CliRunner()
    cli = pytest.importorskip("fastsim.cli.main")
    few = ("--loss", "siglip", "--baseline", "eager torch", "--sizes", "8", "--dim", "4")
    brief = ("--measure", "time", "--seconds", "0.01", "--no-progress", "--processes", "0")
    done = runner.invoke(cli.main, ["bench", *few, *brief, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "siglip, 8 x 4" in done.stdout
    path = tmp_path / results.device_name() / "losses.jsonl"
    assert f"wrote {path}" in done.stdout
    about, rows = results.read(path)
    for row in rows:
        if row.get("implementation") == "eager torch" and "loss" in row:
            row["repeats ms"] = [1e9 * value for value in row["repeats ms"]]
    results.write(tmp_path / "slow.jsonl", about, rows)
    read = ["bench", "--from", str(path), "--against"]
    assert runner.invoke(cli.main, [*read, str(path)]).exit_code == 0
    done = runner.invoke(cli.main, [*read, str(tmp_path / "slow.jsonl")])
    assert done.exit_code == 1
    assert "2 of 2 ratios changed" in done.stdout
    for wrong in (["--loss", "nce"], ["--sizes", "0"], ["--from", __file__]):
        assert runner.invoke(cli.main, ["bench", *wrong]).exit_code == 2
