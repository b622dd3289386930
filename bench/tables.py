"""The tables of the losses in bench/README.md, made from result files and nothing else."""

import functools
import statistics

from bench.figures import FIGURES, HEADLINES, LINK, PROCESSES, WIDTH
from bench.results import FOLDER, folders, read, read_losses
from fastsim.benchmark import model, results
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.found import BOTH, Found

NOTHING = "Not yet measured."
LISTS = ("cosent", "cosent distinct")
PREDICTED = (100_000, 1_000_000)
SLOWEST = 6  # places that are named
GAINS = {"info_nce": "sentence-transformers", "siglip": "open_clip"}  # whose loss people train with
GAIN_ROWS = 8192
MEMORY_ROWS = 16_384


def of_device(table):
    """A table of one device's run of the losses, by folder; what to say where there is none."""

    def make(folder):
        run = read_losses(folder)
        return table(Found(*run)) if run else NOTHING

    return make


def of_file(table, name):
    """The same of the run in another result file of the device."""

    def make(folder):
        run = read(name, folder)
        return table(Found(*run)) if run else NOTHING

    return make


def of_rows(name):
    """Makes of a table of rows that of a device's result file of that name, by folder."""

    def decorated(table):
        @functools.wraps(table)
        def make(folder):
            run = read(name, folder)
            return table(run[1]) if run else NOTHING

        return make

    return decorated


def of_kind(table, name="losses*"):
    """The table of every device of a kind, "cpu" or "cuda", that has results of that name, one
    after the other.
    """

    def make(kind):
        parts = [f"{folder}:\n\n{table(folder)}" for folder in folders(kind, name)]
        return "\n\n".join(parts) or NOTHING

    return make


def markdown(head, rows, left=1):
    """A table; the first `left` columns to the left, the others to the right."""
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def milliseconds(value):
    """With three figures, or all before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def _beside(found, loss, name, rows, width):
    """A baseline's time and how many times as long it takes, or why there is none."""
    ratio = found.ratio(loss, name, found.ours(loss, rows, width), rows, width)
    if ratio:
        best = found.best(loss, name, rows, width)
        return f"{milliseconds(best)} ({ratio[0]:.2f} x)"
    why = found.reason("time", loss, name, rows, width)
    return why if why.startswith("out of memory") else ""


def _baselines(found, losses, what):
    """Implementations with a figure for one of the losses, fastsim left out."""
    names = dict.fromkeys(name for loss, name, *_ in what if loss in losses)
    return [name for name in names if not name.startswith("fastsim ")]


def time(found):
    """Every headline loss: each size at the first width, the largest size at the others."""
    places = dict.fromkeys(
        (loss, rows, width)
        for loss, _, rows, width, which in found.times
        if loss in HEADLINES and which == BOTH
    )
    largest = {width: max(n for _, n, wide in places if wide == width) for _, _, width in places}
    baselines = _baselines(found, HEADLINES, found.times)
    lines = []
    for loss, rows, width in sorted(places, key=lambda p: (p[2], p[1], HEADLINES.index(p[0]))):
        if width != WIDTH and rows != largest[width]:
            continue
        best = milliseconds(found.best(loss, found.ours(loss, rows, width), rows, width))
        cells = [loss, f"{rows:,} x {width}", best]
        lines.append(cells + [_beside(found, loss, name, rows, width) for name in baselines])
    return markdown(["loss", "N x D", "fastsim", *baselines], lines, 2)


def every(found):
    """Forward and backward of every loss beside eager torch, then where a baseline is faster."""
    sizes = sorted({(rows, width) for _, _, rows, width, which in found.times if which == BOTH})
    lines = []
    for loss in dict.fromkeys(loss for loss, *_ in found.times):
        line = [loss]
        for rows, width in sizes:
            ours = found.ours(loss, rows, width)
            ratio = ours and found.ratio(loss, "eager torch", ours, rows, width)
            best = milliseconds(found.best(loss, ours, rows, width)) if ours else ""
            line.append(f"{best} ({ratio[0]:.2f} x)" if ratio else best)
        lines.append(line)
    head = ["loss", *(f"{rows:,} x {width}" for rows, width in sizes)]
    return f"{markdown(head, lines)}\n\n{slower(found)}"


def gains(kind):
    """What a user gains, for README.md: time and memory of one size on each device."""
    lines = []
    for folder in folders(kind):
        found = Found(*read_losses(folder))
        for loss, library in GAINS.items():
            ours = found.ours(loss, GAIN_ROWS, WIDTH)
            cells = [_cost(found, loss, name) for name in (ours, "eager torch", library)]
            if ours and all(cells):
                lines.append([folder, loss, *cells[:2], f"{library} {cells[2]}"])
    head = ["measured on", f"{GAIN_ROWS:,} x {WIDTH}", "fastsim", "eager torch", "others"]
    return markdown(head, lines, 2) if lines else NOTHING


def _cost(found, loss, name):
    """Time and memory, "" where one is not known."""
    best, rise = found.best(loss, name, GAIN_ROWS, WIDTH), (loss, name, GAIN_ROWS, WIDTH)
    if best is None or rise not in found.memory:
        return ""
    return f"{milliseconds(best)}, {found.memory[rise]:,.0f} MB"


def cosent(found):
    """CoSENT over the longest list of scores."""
    places = {loss: rows for loss, _, rows, _, _ in found.times if loss in LISTS}
    baselines = _baselines(found, LISTS, found.times)
    lines = []
    for loss, rows in places.items():
        ours = found.ours(loss, rows, 1)
        labels = "all distinct" if "distinct" in loss else "26 distinct"
        cells = [f"{rows:,}", labels, milliseconds(found.best(loss, ours, rows, 1))]
        lines.append(cells + [_beside(found, loss, name, rows, 1) for name in baselines])
    return markdown(["scores", "labels", "fastsim", *baselines], lines, 2)


def memory(found):
    """The rise of the peak of the headline losses at the three largest sizes."""
    places = [p for p in (*found.memory, *_out_of_memory(found)) if p[0] in HEADLINES]
    names = dict.fromkeys(name for _, name, _, _ in places)
    sizes = sorted({rows for _, _, rows, _ in places})[-3:]
    lines = []
    for loss in HEADLINES:
        for name in names:
            cells = [_rise(found, (loss, name, rows, WIDTH)) for rows in sizes]
            if any(cells):
                lines.append([loss, name, *cells])
    return markdown(["loss", "by", *(f"N = {rows:,}" for rows in sizes)], lines, 2)


def memories(kind):
    """The rise of fastsim's peak of every loss over pairs at one size, a column for each device."""
    runs = {folder: Found(*read_losses(folder)).memory for folder in folders(kind)}
    rises = {
        (loss, folder): rise
        for folder, memory in runs.items()
        for (loss, name, rows, width), rise in memory.items()
        if name.startswith("fastsim ") and (rows, width) == (MEMORY_ROWS, WIDTH)
    }
    devices = [folder for folder in runs if any(of == folder for _, of in rises)]
    lines = [
        [loss, *(_megabytes(rises.get((loss, folder))) for folder in devices)]
        for loss, case in CASES.items()
        if case.products[1] and any(of == loss for of, _ in rises)
    ]
    return markdown([f"N = {MEMORY_ROWS:,}", *devices], lines) if lines else NOTHING


def _out_of_memory(found):
    return [key for (measure, *key), why in found.why.items() if _fails(measure, why)]


def _fails(measure, why):
    return measure == "memory" and why.startswith("out of memory")


def _rise(found, place):
    if place in found.memory:
        return _megabytes(found.memory[place])
    why = found.reason("memory", *place)
    return "out of memory" if _fails("memory", why) else ""


def _megabytes(rise):
    return "" if rise is None else f"{max(rise, 0):,.0f} MB"


def spread(found):
    """How far the repeats lie apart, in a sentence."""
    apart = [
        max(repeats) / min(repeats) - 1
        for (loss, name, *_), repeats in found.times.items()
        if name.startswith("fastsim ") and loss in HEADLINES and len(repeats) > 1
    ]
    if not apart:
        return NOTHING
    processes = found.about["settings"].get("processes")
    of = f"{processes} fresh processes" if processes else "the parts of one process"
    return (
        f"The best times of {of} lie {statistics.median(apart):.1%} apart in the median"
        f" (fastsim's headline losses), {max(apart):.0%} at worst."
    )


def slower(found):
    """Where a baseline takes less time than fastsim, a line for either pass."""
    lines = []
    for which, title in ((BOTH, "forward and backward"), ("forward", "the forward pass alone")):
        ratios = {}
        for loss, name, rows, width, of in found.times:
            ours = found.ours(loss, rows, width, of)
            if of == which and ours and not name.startswith("fastsim "):
                place = f"{loss} {rows:,} x {width} ({name}"
                ratios[place] = found.ratio(loss, name, ours, rows, width, of)[0]
        lowest = sorted((value, place) for place, value in ratios.items() if value < 1)
        if ratios:
            named = "; ".join(f"{place} {value:.2f} x)" for value, place in lowest[:SLOWEST])
            first = f", the {SLOWEST} most" if len(lowest) > SLOWEST else ""
            where = f"{first}: {named}" if lowest else ""
            lines.append(f"* {title}: {len(lowest)} of {len(ratios)} ratios{where}.")
    return "\n".join(lines) or NOTHING


def scaling(found):
    """The model's error at every measured size, and what it says of larger batches."""
    try:
        points = model.errors(found.about, found.rows)
        rates = {
            loss: model.rates_of(found.about, found.rows, loss, link=LINK) for loss in HEADLINES
        }
    except ValueError:
        return NOTHING
    off = {(loss, n): p / t - 1 for loss, n, width, t, p in points if width == WIDTH}
    sizes = sorted({n for _, n in off})
    ahead = [(rows, processes) for rows in PREDICTED for processes in PROCESSES[:2]]
    lines = []
    for loss in HEADLINES:
        errors = [f"{off[loss, n]:+.0%}" if (loss, n) in off else "" for n in sizes]
        seconds = (model.seconds(loss, n, WIDTH, rates[loss], processes=r) for n, r in ahead)
        lines.append([loss, *errors, *(f"{value:,.1f} s" for value in seconds)])
    head = [f"error, N = {n:,}" for n in sizes]
    head += [f"N = {n:,}" + (f", {r} processes" if r > 1 else "") for n, r in ahead]
    return markdown(["loss", *head], lines)


def pictures(folder):
    """The figures of a device but the first, which opens README.md; paths from bench/README.md."""
    there = [name for name in list(FIGURES)[1:] if (FOLDER / folder / f"{name}.png").is_file()]
    parts = [f"![{FIGURES[n][1]}](results/{folder}/{n}.png)" for n in there]
    return "\n\n".join(parts) or NOTHING


def estimates(device):
    """Times that were reckoned rather than measured."""
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
    """What the loss takes on many GPUs, reckoned rather than measured."""
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
    after = (
        f"The faster exchange by rows of a rank: {spans}. Gathered, 80 GB hold"
        f" {about['ranks that 80 GB hold gathered']:,} ranks of these rows."
    )
    return f"{text}\n\n{markdown(head, lines, 3)}\n\n{after}"


def _spans(row, link):
    return "faster" in row and row["link"] == link


def parity(folder, name="parity"):
    """Differences to the peers in float32; the file has the other dtypes too."""
    run = read(name, folder)
    if not run:
        return NOTHING
    kinds = [f"{of} {which}" for of in ("value", "gradient") for which in ("median", "worst")]
    kinds += ["our error worst", "their error worst"]
    lines = [
        [row["loss"], f"`{row['by']}`", row["peer"], *(f"{row[kind]:.0e}" for kind in kinds)]
        for row in run[1]
        if row["dtype"] == "float32" and "not measured" not in row
    ]
    return markdown(["loss", "by", "peer", *kinds], lines, 3)


def kernel_parity(folder):
    """The same of kernels under Triton's interpreter."""
    return parity(folder, "parity_kernels")
