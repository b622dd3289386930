"""python -m bench.report: makes the tables and figures of README.md and bench/README.md.

They are made from the result files. A table stands between `<!-- table: NAME OF -->` and
`<!-- end -->`, where OF is a device's folder in bench/results or a kind of device.
tests/test_readme.py checks that the tables are those of the files.
"""

import re
from pathlib import Path

import click

from bench import (
    amx,
    drop_ins,
    errors,
    gpu_kernels,
    gpu_table,
    info_nce_arguments,
    large_batch,
    late_interaction,
    many_classes,
    matryoshka,
    over_products,
    tables,
)
from bench.examples.table import table as examples
from bench.figures import draw
from bench.peer_suites.table import table as peer_suites
from bench.results import folders, read_losses
from bench.training import late_interaction as token_vectors
from bench.training import matryoshka as prefixes
from bench.training.tables import crossed_table, improved_table

README = Path(__file__).parent.parent / "README.md"
RESULTS = Path(__file__).parent / "README.md"
PAGES = (README, RESULTS)
MARKED = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES = {
    "time": tables.from_run(tables.time),
    "autocast": tables.for_every_device(tables.from_run_in(tables.time, "autocast"), "autocast"),
    "bfloat16": tables.for_every_device(tables.from_run_in(tables.every, "bfloat16"), "bfloat16"),
    "gains": tables.gains,
    "cosent": tables.from_run(tables.cosent),
    "memory": tables.from_run(tables.memory),
    "memories": tables.memories,
    "slower": tables.from_run(tables.slower),
    "spread": tables.from_run(tables.spread),
    "scaling": tables.from_run(tables.scaling),
    "pictures": tables.pictures,
    "gpu": gpu_table.table,
    "kernels": gpu_kernels.table,
    "estimates": tables.estimates,
    "ranks": tables.ranks,
    "parity": tables.parity,
    "kernel_parity": tables.kernel_parity,
    "examples": examples,
    "peer_suites": peer_suites,
    "late_interaction": tables.for_every_device(late_interaction.table, late_interaction.NAME),
    "drop_ins": drop_ins.table,
    "drop_ins_training": drop_ins.training_table,
    "info_nce_arguments": tables.for_every_device(
        info_nce_arguments.table, info_nce_arguments.NAME
    ),
    "many_classes": tables.for_every_device(many_classes.table, many_classes.NAME),
    "large_batch": large_batch.table,
    "matryoshka": tables.for_every_device(matryoshka.table, matryoshka.NAME),
    "over_products": tables.for_every_device(over_products.table, over_products.NAME),
    "amx": tables.for_every_device(amx.table, amx.NAMES),
    "errors": tables.for_every_device(errors.table, errors.NAME),
    "improved": lambda _: improved_table(),
    "crossed": lambda _: crossed_table(),
    "token_vectors": token_vectors.table,
    "prefixes": prefixes.table,
}


def filled(text):
    """The text, with every marked table made again."""

    def make(match):
        head, name, device, end = match.groups()
        return f"{head}{TABLES[name](device)}\n{end}"

    return MARKED.sub(make, text)


@click.command()
def main():
    """Draw the figures and fill the tables of every page."""
    for kind in ("cpu", "cuda"):
        for folder in folders(kind):
            for name, _ in draw(folder, read_losses(folder)):
                click.echo(f"bench/results/{folder}/{name}")
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
