"""The table of the GPU sessions of a device, from gpu*.jsonl in bench/results/<device>."""

from bench.results import FOLDER
from bench.tables import NOTHING, markdown, milliseconds
from fastsim.benchmark import results
from fastsim.benchmark.measurements import Measurements

OURS = ("fastsim cuda", "fastsim triton", "fastsim torch")
PLAIN = ("eager torch", "torch.compile")


def table(folder):
    """Time and memory of each loss, size and commit, beside the fastest of the other packages.

    Below it stands the rate of the library's best square product.
    """
    lines, rates = [], []
    for path in sorted((FOLDER / folder).glob("gpu*.jsonl")):
        about, rows = results.read(path)
        measurements = Measurements(about, rows)
        rates += [row["GFLOP/s"] for row in rows if row.get("name") == "square product"]
        places = {}  # (loss, N, width) -> implementations that were timed
        for loss, name, size, width, _ in measurements.times:
            places.setdefault((loss, size, width), []).append(name)
        for order, ((loss, size, width), names) in enumerate(places.items()):
            best = {name: measurements.best(loss, name, size, width) for name in names}
            cells = {name: _cell(measurements, loss, name, size, width) for name in names}
            other = min(best.keys() - {*OURS, *PLAIN}, key=best.get, default=None)
            line = [loss, f"{size:,}", about["commit"]]
            line += [cells.get(name, "") for name in (*OURS, *PLAIN)]
            line.append(f"{other} {cells[other]}" if other else "")
            lines.append(((size, about["commit"], order), line))
    head = ["loss", "N", "commit", *(name.removeprefix("fastsim ") for name in OURS), *PLAIN]
    body = [cells for _, cells in sorted(lines)]
    if not body:
        return NOTHING
    text = markdown([*head, "the fastest of other packages"], body, 3)
    if not rates:
        return text
    return f"{text}\n\nThe library's best square product: {max(rates) / 1000:.0f} TFLOP/s."


def _cell(measurements, *place):
    """The time, and the memory if it is known."""
    memory = f", {measurements.memory[place]:,.0f} MB" if place in measurements.memory else ""
    return milliseconds(measurements.best(*place)) + memory
