"""The scaling model, the parity report, the tables and figures: from rows and nothing else."""

import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib", reason="the figures need matplotlib")

from bench import (
    drop_in_cases,
    drop_ins,
    figures,
    info_nce_arguments,
    large_batch,
    many_classes,
    matryoshka,
    parity,
    report,
)
from bench import results as kept
from bench import tables as markdown
from fastsim.backends.cpu import sizes
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.benchmark import model, results
from fastsim.benchmark.baselines import BASELINES, ours
from fastsim.benchmark.baselines.baseline import Baseline
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import Measurements
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import Settings

RATES = model.Rates(product=1e11, exp=1e9, copy=1e10, call=1e-3, link=1e9)


def ceilings(loss="info_nce"):
    calls = {"measure": "ceiling", "name": "call", "loss": loss, "implementation": "fastsim cpu"}
    return [
        {"measure": "ceiling", "name": "products", "rows": 64, "width": 8, "GFLOP/s": 100.0},
        {"measure": "ceiling", "name": "products", "rows": 8, "width": 8, "GFLOP/s": 10.0},
        {"measure": "ceiling", "name": "exp", "G/s": 1.0},
        {"measure": "ceiling", "name": "copy", "GB/s": 10.0},
        calls | {"repeats ms": [1.5, 1.0]},
    ]


def about(**settings):
    return {"device": "d", "kind": "cpu", "versions": {}, "commit": "c", "settings": settings}


# ---- the model ----


def test_the_model_adds_up():
    # InfoNCE, N = 1000, D = 100: 6e8 operations, 1e6 exponentials, 4 bytes x 6 passes x 2e5.
    alone = 1e-3 + 6e8 / 1e11 + 1e6 / 1e9 + 4.8e6 / 1e10
    assert model.seconds("info_nce", 1000, 100, RATES) == pytest.approx(alone)
    # Four processes: a quarter of the scores, own rows and all columns, 3/4 of them travelling.
    four = 1e-3 + 1.5e8 / 1e11 + 2.5e5 / 1e9 + 4 * 6 * 1.25e5 / 1e10 + 2 * 0.75 * 4e5 / 1e9
    assert model.seconds("info_nce", 1000, 100, RATES, processes=4) == pytest.approx(four)
    # The symmetric loss: a fourth product and a second visit.
    more = model.seconds("info_nce symmetric", 1000, 100, RATES) - alone
    assert more == pytest.approx(2e8 / 1e11 + 1e6 / 1e9)
    # Half of the fourth product, where half a million of the million scores are kept.
    kept = replace(RATES, kept=500_000)
    saved = model.seconds("info_nce symmetric", 1000, 100, RATES) - model.seconds(
        "info_nce symmetric", 1000, 100, kept
    )
    assert saved == pytest.approx(1e8 / 1e11)
    assert model.seconds("info_nce", 1000, 100, kept) == pytest.approx(alone)
    # Several processes keep none.
    both = [model.seconds("info_nce symmetric", 1000, 100, r, processes=4) for r in (RATES, kept)]
    assert both[0] == both[1]


def test_the_model_takes_measured_ceilings():
    assert model.rates_of(about(), ceilings(), link=1e9) == replace(RATES, kept=sizes.KEPT)
    with pytest.raises(ValueError, match="rates: wanted measured ceilings"):
        model.rates_of(about(), ceilings()[2:])
    place = {"loss": "info_nce", "implementation": "fastsim cpu", "rows": 1000, "width": 100}
    time = {"measure": "time", **place, "pass": "forward + backward", "repeats ms": [20.0, 10.0]}
    ((*where, measured, predicted),) = model.errors(about(), [*ceilings(), time])
    assert where == ["info_nce", 1000, 100]
    assert measured == pytest.approx(10e-3)
    assert predicted == model.seconds("info_nce", 1000, 100, RATES)


# ---- parity ----


def test_parity_of_a_formula_and_of_a_wrong_one(usable):
    usable("cpu")
    case, same = CASES["info_nce"], BASELINES["eager torch"]
    row = parity.compare(case, same, torch.float64, 5)
    # Logits up to 100 of at most MOST_ROWS x MOST_WIDTH terms.
    rounding = 100 * parity.MOST_ROWS * parity.MOST_WIDTH * torch.finfo(torch.float64).eps
    assert row["cases"] == 5
    assert 0 <= row["gradient median"] <= row["gradient worst"] < rounding

    def doubled(problem):
        call = ours("eager").call(problem)
        return lambda *leaves: 2 * call(*leaves)

    row = parity.compare(case, Baseline("wrong", "torch", {"info_nce": doubled}), torch.float64, 5)
    assert row["value worst"] > 0.1
    assert row["gradient worst"] == pytest.approx(0.5)
    assert row["our error worst"] == pytest.approx(0.5)
    assert row["their error worst"] < rounding


def test_parity_says_what_a_peer_does_not_take():
    def refusing(problem):
        def call(*leaves):
            raise NotImplementedError("no such dtype")

        return call

    peer = Baseline("refusing", "torch", {"info_nce": refusing})
    row = parity.compare(CASES["info_nce"], peer, torch.float64, 5)
    assert row["not measured"] == "NotImplementedError: no such dtype"
    assert "value worst" not in row


# ---- prefixes ----


@pytest.mark.parametrize("name", list(matryoshka.MODULES))
def test_all_ways_to_a_loss_of_prefixes_are_the_same_loss(name, monkeypatch, usable):
    usable("cpu")
    monkeypatch.setattr(CpuBackend, "sweep_pays", lambda *_: True)
    problem = CASES[name].problem(24, matryoshka.WIDTHS[0], dtype=torch.float64)

    def results(by):
        return [step(by, problem), *(leaf.grad for leaf in problem.leaves)]

    calls = matryoshka.calls(name, problem)
    full, wanted = (results(calls.pop(by)) for by in (matryoshka.FULL, "eager torch"))
    assert (full[0] - wanted[0]).abs() > 1e-3 * wanted[0].abs()
    for by in calls.values():
        torch.testing.assert_close(results(by), wanted)


def test_a_table_of_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    assert matryoshka.table("here") == "Not yet measured."
    place = {"loss": "siglip", "rows": 2048, "products": "amx"}
    rows = [
        place | {"by": "full width", "repeats ms": [9.0, 8.0]},
        place | {"by": "one sweep", "repeats ms": [10.0, 12.0]},
        place | {"by": "eager torch", "not measured": "out of memory"},
    ]
    results.write(tmp_path / "here" / "matryoshka.jsonl", about(), rows)
    assert matryoshka.table("here").splitlines() == [
        "| loss | rows | products | full width | one sweep |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| siglip | 2,048 | amx | 8.00 ms | 1.25 |",
    ]


# ---- tables and figures ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A device's folder with the results of a small run."""
    for module in (kept, figures, markdown):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    settings = Settings(
        losses=(*figures.HEADLINES, "cosent"),
        baselines=("eager torch",),
        sizes=(8, 16),
        dims=(figures.WIDTH,),
        measures=("time",),
        seconds=0.01,
    )
    environment, rows = run(settings, progress=False)
    place = {"measure": "memory", "loss": "info_nce", "rows": 16, "width": figures.WIDTH}
    later = [place | {"implementation": "fastsim cpu", "rise MB": 17.3}]
    later.append(place | {"implementation": "eager torch", "not measured": "out of memory"})
    for temperature in (0.1, 1.0):
        error = {"measure": "error", "loss": "info_nce", "implementation": "fastsim cpu"}
        error |= {"options": {"temperature": temperature}, "gradient error": 1e-7}
        rows.append(error | {"loss error": 1e-8})
    results.write(tmp_path / "here" / "losses.jsonl", environment, rows)
    results.write(tmp_path / "here" / "losses_memory.jsonl", environment, later)
    return tmp_path / "here"


def test_figures_and_tables(folder):
    from PIL import Image

    drawn = figures.draw("here", kept.read_losses("here"))
    assert [name for name, _ in drawn] == [f"{name}.png" for name in figures.FIGURES]
    for name, _ in drawn:
        with Image.open(folder / name) as image:
            assert image.text[figures.SOURCE] == figures.source("here")
            assert image.size[0] > 300
    _, rows = kept.read_losses("here")
    text = "\n".join(
        report.TABLES[name]("here") for name in ("time", "memory", "spread", "scaling")
    )
    for row in rows:
        if row.get("loss") in figures.HEADLINES and row.get("pass") == "forward + backward":
            assert markdown.milliseconds(min(row["repeats ms"])) in text
    assert "| info_nce | eager torch | out of memory |" in text
    assert "| info_nce | fastsim cpu | 17 MB |" in text
    assert "apart in the median" in text
    shutil.copy(folder / "losses.jsonl", folder / "autocast.jsonl")
    assert report.TABLES["autocast"]("cpu").startswith("here:\n\n| loss |")


def test_a_run_of_parts_alone(folder):
    """Memory may be measured where nothing is timed: a table, and no figures."""
    (folder / "losses.jsonl").unlink()
    about, rows = run = kept.read_losses("here")
    assert about["kind"] == "cpu"
    assert [row["measure"] for row in rows] == ["memory"] * 2
    assert kept.folders("cpu") == ["here"]
    assert figures.draw("here", run) == []
    assert "| info_nce | fastsim cpu | 17 MB |" in report.TABLES["memory"]("here")


def test_a_part_of_another_device_is_refused(folder):
    environment, rows = kept.read("losses", "here")
    results.write(folder / "losses_more.jsonl", environment | {"device": "elsewhere"}, rows)
    with pytest.raises(ValueError, match=r"losses_more.jsonl: wanted a run of .*, got elsewhere"):
        kept.read_losses("here")


def test_where_a_baseline_is_faster():
    place = {"measure": "time", "rows": 64, "width": 8, "pass": "forward + backward"}
    times = {
        ("siglip", "fastsim cpu"): 2.0,
        ("siglip", "open_clip"): 1.0,
        ("siglip", "eager torch"): 3.0,
        ("angle", "fastsim cpu"): 1.0,
        ("angle", "eager torch"): 1.5,
    }
    rows = [
        place | {"loss": loss, "implementation": name, "repeats ms": [value]}
        for (loss, name), value in times.items()
    ]
    wanted = "* forward and backward: 1 of 3 ratios: siglip 64 x 8 (open_clip 0.50 x)."
    assert markdown.slower(Measurements(about(), rows)) == wanted
    assert (
        markdown.slower(Measurements(about(), rows[3:])) == "* forward and backward: 0 of 1 ratios."
    )
    assert markdown.slower(Measurements(about(), [])) == markdown.NOTHING


def test_what_was_not_measured_says_so(folder):
    assert report.TABLES["autocast"]("cuda") == markdown.NOTHING
    assert report.TABLES["time"]("elsewhere") == markdown.NOTHING
    assert report.TABLES["parity"]("here") == markdown.NOTHING
    assert report.TABLES["memories"]("cuda") == markdown.NOTHING
    assert report.TABLES["drop_ins"]("here") == markdown.NOTHING


def test_memory_of_all_devices_side_by_side(folder, monkeypatch):
    monkeypatch.setattr(markdown, "MEMORY_ROWS", 16)
    environment, rows = kept.read("losses_memory", "here")
    results.write(
        folder.parent / "there" / "losses.jsonl", environment, [rows[0] | {"rise MB": 20.0}]
    )
    table = report.TABLES["memories"]("cpu")
    assert table.splitlines()[0] == "| N = 16 | here | there |"
    assert table.splitlines()[2:] == ["| info_nce | 17 MB | 20 MB |"]


def test_tables_of_drop_ins(folder):
    place = {"name": "GIST", "rows": 2048, "width": 384}
    ours = place | {"by": "fastsim", "best s": 0.25, "rise MB": 48.6}
    theirs = place | {"by": "sentence-transformers", "best s": None, "stopped at MB": 12288}
    kept.write(drop_ins.NAME, [ours, theirs], {"device": "here", "settings": {}})
    last = drop_ins.table("here").splitlines()[-1]
    assert last == "| GIST | 2,048 x 384 | 250 ms, 49 MB | more than 12,288 MB |"
    run = {"name": "CoSENT", "losses": [1.0, 2.0], "spearman": 81.234, "seconds": 9.6}
    run |= {"peak MB": 1500.2, "by": "fastsim"}
    other = run | {"by": "sentence-transformers", "losses": [1.0, 2.5]}
    kept.write(f"{drop_ins.NAME}_training", [run, other], {"device": "here", "settings": {}})
    *_, first, second = drop_ins.training_table("here").splitlines()
    assert first == "| CoSENT | fastsim | 2 | 81.23 | 10 s | 1,500 MB | 2e-01 |"
    assert second == "| CoSENT | sentence-transformers | 2 | 81.23 | 10 s | 1,500 MB |  |"


@pytest.mark.parametrize("loss", drop_in_cases.CLASS_LOSSES)
def test_a_table_of_many_classes(folder, loss):
    pytest.importorskip("pytorch_metric_learning", reason="it is measured beside that")
    rows = list(many_classes.measured(loss, (20, 90, 8), 0.01))
    assert [row["by"] for row in rows] == list(many_classes.LIBRARIES)
    rows = [
        row | {"repeats ms": [1200.4, 1234.5], "MB": 60.6 * (place + 1)}
        for place, row in enumerate(rows)
        if min(row["repeats ms"]) > 0 and row["MB"] >= 0
    ]
    kept.write(many_classes.NAME, rows, {"device": "here", "settings": {}})
    costs = "1,200 ms, 61 MB | 1,200 ms, 121 MB"
    assert many_classes.table("here").splitlines()[-1] == f"| {loss} | 20 | 90 | 8 | {costs} |"


def test_a_table_of_arguments(folder, usable):
    usable("cpu")
    names = info_nce_arguments.ARGUMENTS
    learnt, smoothed = ("temperature",), ("temperature", "label_smoothing")
    rows = []
    for place, choice in enumerate((learnt, smoothed)):
        times = iter([1.0, 3.0 + place])
        measured = info_nce_arguments.measured(choice, 6, 0.01)
        rows += [row | {"repeats ms": [9.0, next(times)]} for row in measured]
    assert not list(info_nce_arguments.measured(("symmetric", "directions"), 6, 0.01))
    kept.write(info_nce_arguments.NAME, rows, {"device": "here", "settings": {}})
    lines = info_nce_arguments.table("here").splitlines()
    assert lines[0].startswith("6 rows, ")
    of_learnt = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert of_learnt == ["nothing else", "3.00", *("-" for _ in names[1:])]
    assert lines[-1].startswith("| `label_smoothing` | 4.00 | - |")


def test_a_table_of_a_large_batch(folder):
    step = {"part": "step", "name": "fastsim", "batch": 16384, "micro batch": 32}
    step |= {"encode s": 100.0, "loss s": 3.21, "encode again s": 300.0, "loss operations": 14}
    trained = {"part": "training", "batch": 4096, "micro batch": 32, "steps": 2}
    trained |= {"seconds": 240.4, "peak GB": 1.02}
    kept.write(large_batch.NAME, [trained, step], {"device": "here", "settings": {}})
    lines = large_batch.table("here").splitlines()
    assert lines[2] == "| fastsim | 16,384 | 32 | 100.0 s | 3.2 s | 300.0 s | 14 |"
    assert lines[-1].endswith("32 a micro-batch: 120 s a step, 1.0 GB at its peak.")
