"""The figures of README.md and bench/README.md, made from result files and nothing else.

Each PNG carries the hash of the files that it was drawn from, so that a test can tell a stale one.
"""

import hashlib

from bench.results import FOLDER, parts
from fastsim.benchmark import model
from fastsim.benchmark.baselines import BASELINES
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.found import Found

WIDTH = 384
HEADLINES = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")
OURS = ("#1f6f8b", "#0b3954")
OTHERS = (
    *("#b03a2e", "#d68910", "#7d3c98", "#5d6d7e", "#229954", "#111111"),
    *("#c2185b", "#8d9b2e", "#2e4fb0", "#a04000", "#c9a27e", "#e57373"),
)
PROCESSES = (1, 8, 64)
LINK = 25e9  # bytes per second between processes, stated: a 200 Gbit/s network
SOURCE = "Source"  # the key of the hash among the PNG's texts


def source(folder):
    """Hash of the result files that a device's figures are drawn from."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in parts(folder))).hexdigest()


def draw(folder, run):
    """Every figure that the run has points for, in bench/results/<folder>/; [(file, what)].

    None of a run without times.
    """
    import matplotlib

    matplotlib.use("Agg")
    found, drawn = Found(*run), []
    for name, (function, what) in FIGURES.items() if found.times else ():
        figure = function(found)
        if figure is not None:
            metadata = {SOURCE: source(folder)}
            figure.savefig(FOLDER / folder / f"{name}.png", dpi=110, metadata=metadata)
            drawn.append((f"{name}.png", what))
    return drawn


def _axes(count, title=None):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * count, 3.6), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _style(names):
    """{name: (colour, width of the line)}: fastsim's backends stand out; a baseline has one colour
    in every figure."""
    ours = [name for name in names if name.startswith("fastsim ") and name != "fastsim eager"]
    others = [name for name in names if name not in ours]
    return {name: (OURS[k % len(OURS)], 2.4) for k, name in enumerate(ours)} | {
        name: (OTHERS[_place(name) % len(OTHERS)], 1.3) for name in others
    }


def _place(name):
    """The place of a baseline among all; what is none comes after them."""
    return [*BASELINES, name].index(name)


def _lines(axis, curves):
    """Log-log curves {name: {x: y}}."""
    for name, (colour, wide) in _style(curves).items():
        points = sorted(curves[name].items())
        axis.plot(*zip(*points, strict=True), "o-", ms=3, lw=wide, color=colour, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)


def _times(found, loss, width=WIDTH):
    curves = {}
    for place, name, rows, wide, which in found.times:
        if (place, wide, which) == (loss, width, "forward + backward"):
            best = found.best(loss, name, rows, width)
            curves.setdefault(name, {})[rows] = best
    return curves


def _time_panel(axis, found, loss):
    _lines(axis, _times(found, loss))
    floor = {
        rows: CASES[loss].flop(rows, wide) / (1e6 * rate)
        for (rows, wide), rate in sorted(found.rates.items())
        if wide == WIDTH
    }
    axis.plot(*zip(*floor.items(), strict=True), "k:", lw=1, label="bare products")
    axis.legend(fontsize=7)
    axis.set_xlabel("N")
    axis.set_ylabel("ms, forward + backward")
    axis.set_title(f"{loss}, D = {WIDTH}", fontsize=10)


def time_and_memory(found):
    figure, (left, right) = _axes(2)
    _time_panel(left, found, "info_nce")
    curves = {}
    for (loss, name, rows, _), rise in found.memory.items():
        if loss == "info_nce":
            curves.setdefault(name, {})[rows] = max(rise, 1.0)
    _lines(right, curves)
    limit = found.about["settings"].get("memory_limit")
    failed = {}
    for (measure, loss, name, rows, _), why in found.why.items():
        if (measure, loss) == ("memory", "info_nce") and why.startswith("out of memory"):
            failed[name] = min(rows, failed.get(name, rows))
    # Marks at one place lie upon one another: the first is the largest, so that all are seen.
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


def losses(found):
    figure, axes = _axes(3)
    for axis, loss in zip(axes, HEADLINES[1:], strict=True):
        _time_panel(axis, found, loss)
    return figure


def error(found):
    curves = {}
    for row in found.rows:
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


def scaling(found):
    try:
        rates = model.rates_of(found.about, found.rows, link=LINK)
    except ValueError:
        return None
    figure, (axis,) = _axes(1)
    sizes = [64 * 2**k for k in range(15)]
    for processes, line in zip(PROCESSES, ("-", "--", ":"), strict=True):
        label = "model" if processes == 1 else f"model, {processes} such processes"
        curve = [model.seconds("info_nce", n, WIDTH, rates, processes=processes) for n in sizes]
        axis.plot(sizes, curve, line, color="0.3", lw=1.2, label=label)
    points = [p for p in model.errors(found.about, found.rows) if p[0] == "info_nce"]
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
