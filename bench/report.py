"""python -m bench.report: writes the README's tables and figures from the result files.

A table stands between `<!-- table: NAME DEVICE -->` and `<!-- end -->`; tests/test_readme.py checks
that what stands there is what the files say.
"""

import re
from pathlib import Path

import click

from bench.core import PRODUCTS
from bench.results import FOLDER, read
from bench.training.tables import crossed_table, improved_table

README = Path(__file__).parent.parent / "README.md"
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def core_table(device):
    """Time of every loss beside its eager formula and the bare products."""
    best = {}
    for row in read("core", device):
        if "rows" in row:
            best[row["rows"], row["width"], row["name"]] = row["best ms"]
    lines = ["| loss | N x D | fastsim | eager torch | sentence-transformers | bare products |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for (rows, width, name), ours in best.items():
        loss, _, who = name.partition(": ")
        if who != "fastsim":
            continue
        cells = [f"{loss}", f"{rows:,} x {width}", f"{ours:.2f} ms"]
        for other in ("eager", "sentence-transformers"):
            theirs = best.get((rows, width, f"{loss}: {other}"))
            cells.append(f"{theirs:.2f} ms ({theirs / ours:.2f} x)" if theirs else "")
        count = PRODUCTS[loss]
        bare = best[rows, width, f"{count} products"]
        cells.append(f"{count}: {bare:.2f} ms ({ours / bare:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cosent_table(device):
    """CoSENT over a list of a million scores."""
    rows = [row for row in read("core", device) if "scores" in row]
    lines = ["| scores | distinct labels | fastsim | sentence-transformers |"]
    lines.append("| ---: | ---: | ---: | ---: |")
    for count in sorted({row["distinct labels"] for row in rows}):
        best = {row["name"]: row["best ms"] for row in rows if row["distinct labels"] == count}
        ours, theirs = best["cosent: fastsim"], best["cosent: sentence-transformers"]
        lines.append(
            f"| 1,000,000 | {count:,} | {ours:.1f} ms | {theirs:.1f} ms ({theirs / ours:.1f} x) |"
        )
    return "\n".join(lines)


def memory_table(device):
    """Rise of the peak memory beyond inputs and gradients."""
    rises = {(r["name"], r["backend"], r["rows"]): r["rise MB"] for r in read("memory", device)}
    sizes = sorted({rows for _, _, rows in rises})
    kinds = [(backend, rows) for backend in ("cpu", "eager") for rows in sizes]
    titles = [f"{'fastsim' if b == 'cpu' else b}, N = {rows:,}" for b, rows in kinds]
    lines = ["| loss | " + " | ".join(titles) + " |", "| --- |" + " ---: |" * len(kinds)]
    for name in dict.fromkeys(name for name, _, _ in rises):
        values = [rises.get((name, *kind)) for kind in kinds]
        cells = ["" if value is None else f"{value:,.0f} MB" for value in values]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {
    "core": core_table,
    "cosent": cosent_table,
    "memory": memory_table,
    "improved": lambda _: improved_table(),
    "crossed": lambda _: crossed_table(),
}


def filled(text):
    """The text with every marked table made anew."""

    def make(match):
        head, name, device, end = match.groups()
        return f"{head}{TABLES[name](device)}\n{end}"

    return MARKED.sub(make, text)


def draw(device):
    """bench/results/<device>/core.png: time against N beside the floor of the bare products."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in read("core", device) if row.get("width") == 384]
    memory = {(r["name"], r["backend"], r["rows"]): r["rise MB"] for r in read("memory", device)}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    losses = list(PRODUCTS)
    largest = max(row["rows"] for row in rows)
    best = {row["name"]: row["best ms"] for row in rows if row["rows"] == largest}
    for shift, who, colour in ((-0.2, "fastsim", "#1f6f8b"), (0.2, "eager", "#c9c9c9")):
        values = [best[f"{loss}: {who}"] for loss in losses]
        axes[0].bar([i + shift for i in range(len(losses))], values, 0.38, label=who, color=colour)
        sizes = max(rows for _, _, rows in memory)
        rises = [memory[loss, "cpu" if who == "fastsim" else who, sizes] for loss in losses]
        axes[1].bar([i + shift for i in range(len(losses))], rises, 0.38, label=who, color=colour)
    floors = [best[f"{PRODUCTS[loss]} products"] for loss in losses]
    for i, floor in enumerate(floors):
        axes[0].hlines(
            floor, i - 0.45, i + 0.45, color="#b03a2e", label="" if i else "bare products"
        )
    axes[0].set_ylabel("ms, forward + backward")
    axes[0].set_title(f"Time, N = {largest:,}, D = 384, float32")
    axes[1].set_ylabel("MB beyond inputs and gradients")
    axes[1].set_yscale("log")
    axes[1].set_title(f"Peak memory, N = {sizes:,}, D = 384")
    for axis in axes:
        axis.set_xticks(
            range(len(losses)), [loss.replace(" ", "\n") for loss in losses], fontsize=8
        )
        axis.legend(fontsize=8)
    figure.savefig(FOLDER / device / "core.png", dpi=130)


@click.command()
def main():
    """Fill the README's tables and draw its figures."""
    text = README.read_text()
    for device in {match.group(3) for match in MARKED.finditer(text) if match.group(2) == "core"}:
        draw(device)
    README.write_text(filled(text))


if __name__ == "__main__":
    main()
