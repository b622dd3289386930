"""The table of the GPU sessions of a device: gpu*.jsonl in bench/results/<device>."""

from bench.results import FOLDER
from bench.tables import NOTHING, markdown, milliseconds
from fastsim.benchmark import results

OURS = ("fastsim cuda", "fastsim triton", "fastsim torch")
PLAIN = ("eager torch", "torch.compile")


def table(folder):
    """Time and memory of each loss and size, by commit; of other packages the fastest. Below it
    the rate of the library's best square product.
    """
    lines, rates = [], []
    for path in sorted((FOLDER / folder).glob("gpu*.jsonl")):
        about, rows = results.read(path)
        times, memory = _of(rows, "time"), _of(rows, "memory")
        rates += [row["GFLOP/s"] for row in rows if row.get("name") == "square product"]
        for (loss, size), found in times.items():
            kept = memory.get((loss, size), {})
            cells = [_cell(found, kept, name) for name in (*OURS, *PLAIN)]
            others = [name for name in found if name not in (*OURS, *PLAIN)]
            best = min(others, key=found.get, default=None)
            other = f"{best} {_cell(found, kept, best)}" if best else ""
            order = size, about["commit"], list(times).index((loss, size))
            lines.append((order, [loss, f"{size:,}", about["commit"], *cells, other]))
    head = ["loss", "N", "commit", *(name.removeprefix("fastsim ") for name in OURS), *PLAIN]
    body = [cells for _, cells in sorted(lines)]
    if not body:
        return NOTHING
    made = markdown([*head, "the fastest of other packages"], body, 3)
    if not rates:
        return made
    return f"{made}\n\nThe library's best square product: {max(rates) / 1000:.0f} TFLOP/s."


def _of(rows, measure):
    """{(loss, N): {implementation: milliseconds or MB}} of the rows that have a figure."""
    found = {}
    for row in rows:
        if row.get("measure") == measure and "not measured" not in row:
            value = row["rise MB"] if measure == "memory" else min(row["repeats ms"])
            found.setdefault((row["loss"], row["rows"]), {})[row["implementation"]] = value
    return found


def _cell(times, memory, name):
    if name not in times:
        return ""
    return milliseconds(times[name]) + (f", {memory[name]:,.0f} MB" if name in memory else "")
