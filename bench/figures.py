"""The figures of README.md and bench/README.md, made from result files alone.

Each PNG holds the hash of the files that it was drawn from, so that a test can detect a stale one.
"""

import hashlib

from bench.results import FOLDER, parts
from fastsim.benchmark import model
from fastsim.benchmark.baselines import BASELINES
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import Measurements

WIDTH = 384
HEADLINES = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")
OURS = ("#1f6f8b", "#0b3954")
OTHERS = (
    *("#b03a2e", "#d68910", "#7d3c98", "#5d6d7e", "#229954", "#111111"),
    *("#c2185b", "#8d9b2e", "#2e4fb0", "#a04000", "#c9a27e", "#e57373"),
)
PROCESSES = (1, 8, 64)
LINK = 25e9  # bytes per second between processes, assumed: a 200 Gbit/s network
SOURCE = "Source"  # the key of the hash among the PNG's texts


def source(folder):
    """The hash of the result files from which the figures of a device are drawn."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in parts(folder))).hexdigest()


def draw(folder, run):
    """[(file, title)] of the figures that were drawn in bench/results/<folder>/.

    run: (environment, rows). A figure without points is left out; so are all if nothing was timed.
    """
    import matplotlib

    matplotlib.use("Agg")
    measurements, drawn = Measurements(*run), []
    for name, (function, title) in FIGURES.items() if measurements.times else ():
        figure = function(measurements)
        if figure is not None:
            metadata = {SOURCE: source(folder)}
            figure.savefig(FOLDER / folder / f"{name}.png", dpi=110, metadata=metadata)
            drawn.append((f"{name}.png", title))
    return drawn


def _axes(count, title=None):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count, 3.6), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _style(names):
    """{name: (colour, line width)}. fastsim's lines are wider; a baseline keeps its colour in all
    figures.
    """
    ours = [name for name in names if name.startswith("fastsim ") and name != "fastsim eager"]
    others = [name for name in names if name not in ours]
    return {name: (OURS[k % len(OURS)], 2.4) for k, name in enumerate(ours)} | {
        name: (OTHERS[_place(name) % len(OTHERS)], 1.3) for name in others
    }


def _place(name):
    """The index of a baseline among all baselines; other names come last."""
    return [*BASELINES, name].index(name)


def _lines(axis, curves):
    """Draws curves {name: {x: y}} with logarithmic axes."""
    for name, (colour, line_width) in _style(curves).items():
        points = sorted(curves[name].items())
        axis.plot(*zip(*points, strict=True), "o-", ms=3, lw=line_width, color=colour, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)


def _times(measurements, loss, width=WIDTH):
    """{name: {N: milliseconds}} of a loss at one width, forward + backward."""
    curves = {}
    for timed_loss, name, rows, timed_width, which in measurements.times:
        if (timed_loss, timed_width, which) == (loss, width, "forward + backward"):
            best = measurements.best(loss, name, rows, width)
            curves.setdefault(name, {})[rows] = best
    return curves


def _time_panel(axis, measurements, loss):
    _lines(axis, _times(measurements, loss))
    floor = {
        rows: CASES[loss].flop(rows, width) / (1e6 * rate)
        for (rows, width), rate in sorted(measurements.rates.items())
        if width == WIDTH
    }
    axis.plot(*zip(*floor.items(), strict=True), "k:", lw=1, label="bare products")
    axis.legend(fontsize=7)
    axis.set_xlabel("N")
    axis.set_ylabel("ms, forward + backward")
    axis.set_title(f"{loss}, D = {WIDTH}", fontsize=10)


def time_and_memory(measurements):
    figure, (left, right) = _axes(2)
    _time_panel(left, measurements, "info_nce")
    curves = {}
    for (loss, name, rows, _), rise in measurements.memory.items():
        if loss == "info_nce":
            curves.setdefault(name, {})[rows] = max(rise, 1.0)
    _lines(right, curves)
    limit = measurements.about["settings"].get("memory_limit")
    failed = {}
    for (measure, loss, name, rows, _), why in measurements.why.items():
        if (measure, loss) == ("memory", "info_nce") and why.startswith("out of memory"):
            failed[name] = min(rows, failed.get(name, rows))
    # Marks at the same place overlap: the first is the largest, so that all can be seen.
    for size, (name, rows) in zip(range(4 + 5 * len(failed), 0, -5), failed.items(), strict=False):
        colour, _ = _style([name])[name]
        right.plot([rows], [1024 * limit], "x", ms=size, mew=2, color=colour)
    if failed:
        label = f"x: more than {limit:g} GB"
        right.axhline(1024 * limit, color="0.6", lw=0.8, ls="--", label=label)
    right.legend(fontsize=7)
    right.set_xlabel("N")
    right.set_ylabel("MB beyond inputs and gradients")
    right.set_title("info_nce, peak memory of a fresh process", fontsize=10)
    return figure


def losses(measurements):
    figure, axes = _axes(3)
    for axis, loss in zip(axes, HEADLINES[1:], strict=True):
        _time_panel(axis, measurements, loss)
    return figure


def error(measurements):
    curves = {}
    for row in measurements.rows:
        if row["measure"] == "error" and row["loss"] == "info_nce" and "gradient error" in row:
            curve = curves.setdefault(row["implementation"], {})
            curve[row["options"]["temperature"]] = max(row["gradient error"], 1e-9)
    if not curves:
        return None
    figure, (axis,) = _axes(1)
    _lines(axis, curves)
    axis.set_xscale("log", base=10)
    axis.set_xlabel("temperature")
    axis.set_ylabel("relative error of the gradient")
    axis.set_title("info_nce against float64", fontsize=10)
    return figure


def scaling(measurements):
    try:
        rates = model.rates_of(measurements.about, measurements.rows, link=LINK)
    except ValueError:
        return None
    figure, (axis,) = _axes(1)
    sizes = [64 * 2**k for k in range(15)]
    for processes, line in zip(PROCESSES, ("-", "--", ":"), strict=True):
        label = "model" if processes == 1 else f"model, {processes} such processes"
        curve = [model.seconds("info_nce", n, WIDTH, rates, processes=processes) for n in sizes]
        axis.plot(sizes, curve, line, color="0.3", lw=1.2, label=label)
    points = [p for p in model.errors(measurements.about, measurements.rows) if p[0] == "info_nce"]
    points = {rows: measured for _, rows, width, measured, _ in points if width == WIDTH}
    axis.plot(*zip(*points.items(), strict=True), "o", color=OURS[0], label="measured")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)
    axis.set_xlabel("N")
    axis.set_ylabel("seconds, forward + backward")
    axis.set_title(f"info_nce, D = {WIDTH}: model and measured", fontsize=10)
    return figure


FIGURES = {
    "time_and_memory": (time_and_memory, "Time and peak memory against N"),
    "losses": (losses, "Time against N of symmetric InfoNCE, SigLIP and the full triplet"),
    "error": (error, "Error of the gradient against temperature"),
    "scaling": (scaling, "The scaling model beside the measurements"),
}
