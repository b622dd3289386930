"""The tables of the losses in bench/README.md, made from result files alone."""

import functools
import statistics

from bench.figures import FIGURES, HEADLINES, LINK, PROCESSES, WIDTH
from bench.results import FOLDER, folders, read, read_losses
from fastsim.benchmark import model, results
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import BOTH, Measurements

NOTHING = "Not yet measured."
LISTS = ("cosent", "cosent distinct")
PREDICTED = (100_000, 1_000_000)
SLOWEST = 6  # ratios that are named
GAINS = {"info_nce": "sentence-transformers", "siglip": "open_clip"}  # the usual library of a loss
GAIN_ROWS = 8192
MEMORY_ROWS = 16_384


def from_run(table):
    """A function of a device's folder: the table of its run of the losses, or NOTHING.

    table: a function of `Measurements`.
    """

    def make(folder):
        run = read_losses(folder)
        return table(Measurements(*run)) if run else NOTHING

    return make


def from_run_in(table, name):
    """As `from_run`, for the run in the device's result file `name`."""

    def make(folder):
        run = read(name, folder)
        return table(Measurements(*run)) if run else NOTHING

    return make


def from_rows(name):
    """A decorator: makes a function of rows a function of a device's folder.

    The rows are those of the device's result file `name`; without one the table is NOTHING.
    """

    def decorated(table):
        @functools.wraps(table)
        def make(folder):
            run = read(name, folder)
            return table(run[1]) if run else NOTHING

        return make

    return decorated


def for_every_device(table, name="losses*"):
    """A function of a kind, "cpu" or "cuda": the tables of all its devices with results `name`.

    table: a function of a device's folder.
    """

    def make(kind):
        parts = [f"{folder}:\n\n{table(folder)}" for folder in folders(kind, name)]
        return "\n\n".join(parts) or NOTHING

    return make


def markdown(head, rows, left=1):
    """A Markdown table; the first `left` columns are aligned left, the others right."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def milliseconds(value):
    """Milliseconds as text, with three digits, or more if the integer part has more."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def _beside(measurements, loss, name, rows, width):
    """The time of a baseline and its ratio to fastsim's, or the reason why there is none."""
    ratio = measurements.ratio(loss, name, measurements.ours(loss, rows, width), rows, width)
    if ratio:
        best = measurements.best(loss, name, rows, width)
        return f"{milliseconds(best)} ({ratio[0]:.2f} x)"
    why = measurements.reason("time", loss, name, rows, width)
    return why if why.startswith("out of memory") else ""


def _baselines(losses, places):
    """The implementations, except fastsim, of the places (loss, name, ...) with these losses."""
    names = dict.fromkeys(name for loss, name, *_ in places if loss in losses)
    return [name for name in names if not name.startswith("fastsim ")]


def time(measurements):
    """The times of the headline losses: all sizes at the first width, the largest at the others."""
    places = dict.fromkeys(
        (loss, rows, width)
        for loss, _, rows, width, which in measurements.times
        if loss in HEADLINES and which == BOTH
    )
    largest = {width: max(n for _, n, wide in places if wide == width) for _, _, width in places}
    baselines = _baselines(HEADLINES, measurements.times)
    lines = []
    for loss, rows, width in sorted(places, key=lambda p: (p[2], p[1], HEADLINES.index(p[0]))):
        if width != WIDTH and rows != largest[width]:
            continue
        best = milliseconds(
            measurements.best(loss, measurements.ours(loss, rows, width), rows, width)
        )
        cells = [loss, f"{rows:,} x {width}", best]
        lines.append(cells + [_beside(measurements, loss, name, rows, width) for name in baselines])
    return markdown(["loss", "N x D", "fastsim", *baselines], lines, 2)


def every(measurements):
    """Forward + backward of every loss beside eager torch; below, where a baseline is faster."""
    sizes = sorted(
        {(rows, width) for _, _, rows, width, which in measurements.times if which == BOTH}
    )
    lines = []
    for loss in dict.fromkeys(loss for loss, *_ in measurements.times):
        line = [loss]
        for rows, width in sizes:
            ours = measurements.ours(loss, rows, width)
            ratio = ours and measurements.ratio(loss, "eager torch", ours, rows, width)
            best = milliseconds(measurements.best(loss, ours, rows, width)) if ours else ""
            line.append(f"{best} ({ratio[0]:.2f} x)" if ratio else best)
        lines.append(line)
    head = ["loss", *(f"{rows:,} x {width}" for rows, width in sizes)]
    return f"{markdown(head, lines)}\n\n{slower(measurements)}"


def gains(kind):
    """Time and memory of two losses at one size on each device, for README.md."""
    lines = []
    for folder in folders(kind):
        measurements = Measurements(*read_losses(folder))
        for loss, library in GAINS.items():
            ours = measurements.ours(loss, GAIN_ROWS, WIDTH)
            cells = [_cost(measurements, loss, name) for name in (ours, "eager torch", library)]
            if ours and all(cells):
                lines.append([folder, loss, *cells[:2], f"{library} {cells[2]}"])
    head = ["measured on", f"{GAIN_ROWS:,} x {WIDTH}", "fastsim", "eager torch", "others"]
    return markdown(head, lines, 2) if lines else NOTHING


def _cost(measurements, loss, name):
    """Time and memory as text; "" if either is unknown."""
    best, rise = measurements.best(loss, name, GAIN_ROWS, WIDTH), (loss, name, GAIN_ROWS, WIDTH)
    if best is None or rise not in measurements.memory:
        return ""
    return f"{milliseconds(best)}, {measurements.memory[rise]:,.0f} MB"


def cosent(measurements):
    """CoSENT over the longest list of scores."""
    places = {loss: rows for loss, _, rows, _, _ in measurements.times if loss in LISTS}
    baselines = _baselines(LISTS, measurements.times)
    lines = []
    for loss, rows in places.items():
        ours = measurements.ours(loss, rows, 1)
        labels = "all distinct" if "distinct" in loss else "26 distinct"
        cells = [f"{rows:,}", labels, milliseconds(measurements.best(loss, ours, rows, 1))]
        lines.append(cells + [_beside(measurements, loss, name, rows, 1) for name in baselines])
    return markdown(["scores", "labels", "fastsim", *baselines], lines, 2)


def memory(measurements):
    """How far the headline losses raise the peak memory, at the three largest sizes."""
    places = [p for p in (*measurements.memory, *_out_of_memory(measurements)) if p[0] in HEADLINES]
    names = dict.fromkeys(name for _, name, _, _ in places)
    sizes = sorted({rows for _, _, rows, _ in places})[-3:]
    lines = []
    for loss in HEADLINES:
        for name in names:
            cells = [_rise(measurements, (loss, name, rows, WIDTH)) for rows in sizes]
            if any(cells):
                lines.append([loss, name, *cells])
    return markdown(["loss", "by", *(f"N = {rows:,}" for rows in sizes)], lines, 2)


def memories(kind):
    """How far fastsim's losses over pairs raise the peak memory at one size, for each device."""
    runs = {folder: Measurements(*read_losses(folder)).memory for folder in folders(kind)}
    rises = {
        (loss, folder): rise
        for folder, memory in runs.items()
        for (loss, name, rows, width), rise in memory.items()
        if name.startswith("fastsim ") and (rows, width) == (MEMORY_ROWS, WIDTH)
    }
    devices = [device for device in runs if any(folder == device for _, folder in rises)]
    losses = {loss for loss, _ in rises}
    lines = [
        [loss, *(_megabytes(rises.get((loss, folder))) for folder in devices)]
        for loss, case in CASES.items()
        if case.products[1] and loss in losses
    ]
    return markdown([f"N = {MEMORY_ROWS:,}", *devices], lines) if lines else NOTHING


def _out_of_memory(measurements):
    return [key for (measure, *key), why in measurements.why.items() if _fails(measure, why)]


def _fails(measure, why):
    return measure == "memory" and why.startswith("out of memory")


def _rise(measurements, place):
    if place in measurements.memory:
        return _megabytes(measurements.memory[place])
    why = measurements.reason("memory", *place)
    return "out of memory" if _fails("memory", why) else ""


def _megabytes(rise):
    return "" if rise is None else f"{max(rise, 0):,.0f} MB"


def spread(measurements):
    """How far the repeats of fastsim's headline losses differ, in a sentence."""
    apart = [
        max(repeats) / min(repeats) - 1
        for (loss, name, *_), repeats in measurements.times.items()
        if name.startswith("fastsim ") and loss in HEADLINES and len(repeats) > 1
    ]
    if not apart:
        return NOTHING
    processes = measurements.about["settings"].get("processes")
    repeats = f"{processes} fresh processes" if processes else "the parts of one process"
    return (
        f"The best times of {repeats} lie {statistics.median(apart):.1%} apart in the median"
        f" (fastsim's headline losses), {max(apart):.0%} at worst."
    )


def slower(measurements):
    """The ratios at which a baseline is faster than fastsim, a line for each pass."""
    lines = []
    for which, title in ((BOTH, "forward and backward"), ("forward", "the forward pass alone")):
        ratios = {}
        for loss, name, rows, width, timed in measurements.times:
            ours = measurements.ours(loss, rows, width, timed)
            if timed == which and ours and not name.startswith("fastsim "):
                place = f"{loss} {rows:,} x {width} ({name}"
                ratios[place] = measurements.ratio(loss, name, ours, rows, width, timed)[0]
        lowest = sorted((value, place) for place, value in ratios.items() if value < 1)
        if ratios:
            named = "; ".join(f"{place} {value:.2f} x)" for value, place in lowest[:SLOWEST])
            first = f", the {SLOWEST} most" if len(lowest) > SLOWEST else ""
            where = f"{first}: {named}" if lowest else ""
            lines.append(f"* {title}: {len(lowest)} of {len(ratios)} ratios{where}.")
    return "\n".join(lines) or NOTHING


def scaling(measurements):
    """The error of the model at every measured size, and its predictions for larger batches."""
    try:
        points = model.errors(measurements.about, measurements.rows)
        rates = {
            loss: model.rates_of(measurements.about, measurements.rows, loss, link=LINK)
            for loss in HEADLINES
        }
    except ValueError:
        return NOTHING
    errors = {(loss, n): p / t - 1 for loss, n, width, t, p in points if width == WIDTH}
    sizes = sorted({n for _, n in errors})
    predicted = [(rows, processes) for rows in PREDICTED for processes in PROCESSES[:2]]
    lines = []
    for loss in HEADLINES:
        cells = [f"{errors[loss, n]:+.0%}" if (loss, n) in errors else "" for n in sizes]
        seconds = (model.seconds(loss, n, WIDTH, rates[loss], processes=r) for n, r in predicted)
        lines.append([loss, *cells, *(f"{value:,.1f} s" for value in seconds)])
    head = [f"error, N = {n:,}" for n in sizes]
    head += [f"N = {n:,}" + (f", {r} processes" if r > 1 else "") for n, r in predicted]
    return markdown(["loss", *head], lines)


def pictures(folder):
    """A device's figures except the first, which README.md shows; paths are for bench/README.md."""
    names = [name for name in list(FIGURES)[1:] if (FOLDER / folder / f"{name}.png").is_file()]
    parts = [f"![{FIGURES[name][1]}](results/{folder}/{name}.png)" for name in names]
    return "\n\n".join(parts) or NOTHING


def estimates(device):
    """Times that were calculated, not measured."""
    path = FOLDER / "estimates.jsonl"
    if not path.is_file():
        return NOTHING
    about, rows = results.read(path)
    assert device == about["device"].split()[0].lower()
    lines = [
        [
            *(row["loss"], f"{row['rows']:,} x {row['width']}, {row['dtype']}", row["by"]),
            *(f"{row['bytes a score']}", milliseconds(row["products ms"])),
            milliseconds(row["estimated ms"]),
        ]
        for row in rows
    ]
    head = ["loss", "size", "backend", "bytes a score", "products", "estimate"]
    text = (
        f"**Estimates {about['estimate']}.** {about['device']} at its peak of"
        f" {' and '.join(f'{value:g} {unit}' for unit, value in about['settings'].items())}"
        f" ({about['source']})."
    )
    return f"{text}\n\n{markdown(head, lines, 3)}"


def ranks(device):
    """The time and memory of a loss on many GPUs, calculated and not measured."""
    path = FOLDER / "ranks.jsonl"
    if not path.is_file():
        return NOTHING
    about, rows = results.read(path)
    assert device == about["device"].split()[0].lower()
    names = ("products ms", "link ms", "loss ms")
    lines = [
        [
            *(f"{row['ranks']}", row["link"], row["exchange"], f"{row['GB']:.2f} GB"),
            *(milliseconds(row[name]) for name in names),
            f"{row['memory GB']:.1f} GB",
        ]
        for row in rows
        if "ranks" in row
    ]
    head = ["ranks", "link", "exchange", "over the link", "products", "link", "loss", "memory"]
    one = rows[0]
    settings = ", ".join(f"{name} {value:g}" for name, value in about["settings"].items())
    spans = "; ".join(
        f"over {link} "
        + ", ".join(
            f"{row['faster']} from {row['from rows']:,}" for row in rows if _spans(row, link)
        )
        for link in dict.fromkeys(row["link"] for row in rows)
    )
    text = (
        f"**Estimates {about['estimate']}.** {one['loss']} of {one['rows of a rank']:,} rows of"
        f" width {one['width']:,} on every rank, bfloat16, forward and backward. {about['device']}"
        f" at its peak: {settings} ({about['source']})."
    )
    below = (
        f"The faster exchange by rows of a rank: {spans}. Gathered, 80 GB hold"
        f" {about['ranks that 80 GB hold gathered']:,} ranks of these rows."
    )
    return f"{text}\n\n{markdown(head, lines, 3)}\n\n{below}"


def _spans(row, link):
    return "faster" in row and row["link"] == link


def parity(folder, name="parity"):
    """Differences from the peers in float32; the file has the other dtypes too."""
    run = read(name, folder)
    if not run:
        return NOTHING
    kinds = [f"{output} {rank}" for output in ("value", "gradient") for rank in ("median", "worst")]
    kinds += ["our error worst", "their error worst"]
    lines = [
        [row["loss"], f"`{row['by']}`", row["peer"], *(f"{row[kind]:.0e}" for kind in kinds)]
        for row in run[1]
        if row["dtype"] == "float32" and "not measured" not in row
    ]
    return markdown(["loss", "by", "peer", *kinds], lines, 3)


def kernel_parity(folder):
    """As `parity`, for kernels under Triton's interpreter."""
    return parity(folder, "parity_kernels")
