"""A run of `fastsim bench`: a row for everything, and what cannot be is a row that says so."""

import json
from dataclasses import replace

import pytest
import torch

import fastsim
from fastsim.benchmark import compare, results, tables
from fastsim.benchmark import run as run_module
from fastsim.benchmark.baselines import BASELINES, baseline_named
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import Measurements
from fastsim.benchmark.run import Session
from fastsim.benchmark.settings import Settings
from tests.benchmark.tiny import tiny


def test_a_run_has_a_row_for_everything(tmp_path):
    names = ("eager torch", "siglip-kernel")
    about, rows = tiny(losses=("siglip",), baselines=names, measures=("time", "error"))
    results.write(tmp_path / "run.jsonl", about, rows)
    kept = json.loads(json.dumps([about, rows]))
    assert list(results.read(tmp_path / "run.jsonl")) == kept
    assert about["versions"]["torch"] == torch.__version__
    assert kept[0]["settings"]["sizes"] == [8, 16]
    measurements = Measurements(about, rows)
    mine = measurements.ours("siglip", 16, 6)
    for name in (mine, "eager torch"):
        for n in (8, 16):
            for which in ("forward", "forward + backward"):
                assert measurements.best("siglip", name, n, 6, which) > 0
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


@pytest.mark.parametrize(
    ("name", "family", "flags", "wanted"),
    [
        ("AMD EPYC", 25, "avx2", "amd epyc zen3"),
        ("AMD EPYC", 25, "avx2 avx512f", "amd epyc zen4"),
        ("AMD EPYC", 26, "avx2 avx512f", "amd epyc zen5"),
        ("AMD EPYC 7502 32-Core Processor", 23, "avx2", "amd epyc 7502 32-core"),
        ("Intel(R) Xeon(R) Processor", 6, "avx2 avx512f", "intel xeon"),
    ],
)
def test_generations_of_amd_processors_differ(name, family, flags, wanted, tmp_path):
    """Virtual machines give all of them one name."""
    vendor = "AuthenticAMD" if name.startswith("AMD") else "GenuineIntel"
    lines = (f"vendor_id\t: {vendor}", f"cpu family\t: {family}", f"model name\t: {name}")
    one = "\n".join((*lines, f"flags\t\t: fpu {flags}", "power management:\n\n"))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(2 * one)
    assert results._processor(cpuinfo) == wanted


def test_without_cpuinfo_a_processor_is_what_python_calls_it(tmp_path, monkeypatch):
    for found, wanted in (("Apple M4 Processor", "apple m4"), ("", "arm64")):
        monkeypatch.setattr(results.platform, "processor", lambda found=found: found)
        monkeypatch.setattr(results.platform, "machine", lambda: "arm64")
        assert results._processor(tmp_path / "none") == wanted
    assert results._model(tmp_path / "none") == {}


def test_a_result_tells_processors_of_the_same_name_apart(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    lines = ("vendor_id\t: GenuineIntel", "cpu family\t: 6", "model\t\t: 143")
    cpuinfo.write_text("\n".join((*lines, "cache size\t: 491520 KB", "bogomips\t: 4", "\n")))
    monkeypatch.setattr(results, "CPUINFO", cpuinfo)
    wanted = {"cpu family": "6", "model": "143", "cache size": "491520 KB"}
    assert results.environment()["processor"] == wanted


def test_a_device_without_kernels_has_the_instructions_of_torch(monkeypatch):
    monkeypatch.setattr(type(results.get("cpu")), "unsupported_reason", lambda self: "not built")
    name = results.device_name()
    assert name.endswith(f"-{torch.backends.cpu.get_cpu_capability().lower()}")


def test_a_share_of_the_ceiling():
    case = CASES["info_nce"]
    about, rows = tiny(losses=("info_nce",), baselines=("none",))
    measurements = Measurements(about, rows)
    rate = next(r for r in rows if r.get("name") == "products" and r["rows"] == 16)["GFLOP/s"]
    name = measurements.ours("info_nce", 16, 6)
    seconds = measurements.best("info_nce", name, 16, 6) / 1e3
    assert case.flop(16, 6) == 3 * 2 * 16 * 16 * 6
    assert measurements.share(case, name, 16, 6) == pytest.approx(3072 * 3 / seconds / (1e9 * rate))


def test_a_call_that_would_take_too_long_is_not_made():
    _, rows = tiny(losses=("info_nce",), baselines=("eager torch",), limit=0.0)
    rows = [row for row in rows if row["measure"] == "time" and "loss" in row]
    made = [row for row in rows if row["rows"] == 8 and "pass" in row]
    assert made
    assert all("repeats ms" in row for row in made)
    late = [row["not measured"] for row in rows if row["rows"] == 16]
    assert len(late) == 2
    assert all("beyond the limit of 0" in why for why in late)


def test_a_time_is_foretold_by_the_scores():
    """A loss over N x N scores takes the square of N, one over a list N."""
    session = Session(Settings(limit=3.0))
    for name, wanted in (("info_nce", 0.5 * 3**2), ("cosent", 0.5 * 3)):
        case = CASES[name]
        assert session._expected_seconds(case, "eager torch", 24, 6) is None
        session.latest_times[name, "eager torch", 6] = 8, 0.5
        assert session._expected_seconds(case, "eager torch", 24, 6) == wanted
        late = session._why_too_long(case, BASELINES["eager torch"], 24, 6)
        assert (late is None) == (wanted <= 3.0)


def test_what_failed_is_not_tried_with_more_rows():
    """The smallest that failed counts, whichever was tried first: memory is measured by itself."""
    session, case, peer = Session(Settings()), CASES["info_nce"], BASELINES["eager torch"]
    for rows in (512, 64, 2048):
        session._note_failure(case, peer.name, rows, f"failed at {rows}")
    assert session._why_left_out(case, peer, 63) is None
    for rows in (64, 65, 512):
        assert session._why_left_out(case, peer, rows).startswith("failed at")
    assert session._why_left_out(CASES["siglip"], peer, 512) is None


def test_a_call_that_takes_long_is_made_once_in_each_process(monkeypatch):
    """Without a call before it that is not counted, which the faster ones beside it still get."""
    asked, slow = [], "eager torch"

    def in_turns(functions, *, fewest, cold, **_):
        asked.append((fewest, cold))
        return {name: [0.5] for name in functions}

    monkeypatch.setattr(run_module, "in_turns", in_turns)
    for count in (1, 4):
        session = Session(Settings(processes=count))
        for seconds in (0.2, 0.3):  # of twice the rows: 0.8 and 1.2
            session.latest_times["siglip", slow, 6] = 8, seconds
            session.latest_times["siglip", "fastsim cpu", 6] = 8, 1e-3
            functions = dict.fromkeys((slow, "fastsim cpu"))
            session._timed(CASES["siglip"], 16, 6, "forward", functions)
    assert asked == [(2, []), (2, [slow]), (2, []), (1, [slow])]


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
    assert session.latest_times == {("siglip", "eager torch", 60): (80, 0.5)}


def test_an_error_is_that_of_a_size_which_can_be_afforded():
    few = replace(CASES["siglip"], error_rows=12)
    for sizes, rows in (((), 12), ((8,), 8), ((8, 16), 12)):
        session = Session(Settings(baselines=("none",), backends=("torch",), sizes=sizes))
        assert [row["rows"] for row in session.error(few, {})] == [rows]


def test_a_quick_run_leaves_out_what_is_slow():
    quick, compiled = Settings(quick=True), BASELINES["torch.compile"]
    assert quick.why_left_out(compiled, 64) == "left out of a quick run"
    assert replace(quick, baselines=("torch.compile",)).why_left_out(compiled, 64) is None
    assert (quick.pass_seconds, Settings().pass_seconds) == (0.2, 0.5)
    assert replace(quick, seconds=0.1).pass_seconds == 0.1
    peer = replace(BASELINES["eager torch"], up_to=100)
    assert [Settings().why_left_out(peer, rows) is None for rows in (100, 101)] == [True, False]
    assert Settings(sizes=(101,)).why_left_out(peer, 101) is None


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
    for wrong in (["--loss", "nce"], ["--sizes", "0"], ["--memory-limit", "nan"]):
        assert runner.invoke(cli.main, ["bench", *wrong]).exit_code == 2


@pytest.mark.parametrize("option", ["--from", "--against"])
def test_a_file_that_holds_no_run_is_named(option, tmp_path):
    runner = pytest.importorskip("click.testing").CliRunner()
    cli = pytest.importorskip("fastsim.cli.main")
    path, other = tmp_path / "run.jsonl", {"settings": {}, "device": "d", "versions": {}}
    place = {"measure": "time", "loss": "siglip"}
    about = json.dumps(other | {"commit": "c"})
    texts = ["null", json.dumps(other), "[]", "a text", *(f"{about}\n{r}" for r in ("1", "{}"))]
    for text in (*texts, f"{about}\n{json.dumps(place)}", None):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        done = runner.invoke(cli.main, ["bench", option, str(path)])
        assert done.exit_code == 3, text
        assert f"Error: {option[2:]}: " in done.stderr
        assert str(path) in done.stderr
