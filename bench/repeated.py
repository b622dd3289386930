"""What a later run of `fastsim bench` says of an earlier one: python -m bench.repeated DEVICE FILE

Of the ratios in bench/results/DEVICE/losses.jsonl, and the same in FILE, a summary is kept in
bench/results/DEVICE/repeated.jsonl; FILE itself need not be.
"""

import statistics

import click

from bench.results import FOLDER
from fastsim.benchmark import compare, results


@click.command()
@click.argument("device")
@click.argument("later")
def main(device, later):
    """Compare the run in the file LATER with that kept of DEVICE."""
    folder = FOLDER / device
    about, rows = results.read(later)
    found = compare.shared(results.read(folder / "losses.jsonl"), (about, rows))
    row = {
        "measure": "repeated",
        "ratios": len(found),
        "beyond their spread": len(compare.changed(found)),
        "median difference": statistics.median(abs(two[0] / one[0] - 1) for _, one, two in found),
    }
    results.write(folder / "repeated.jsonl", about, [row])
    click.echo(f"{folder / 'repeated.jsonl'}: {row}")


if __name__ == "__main__":
    main()
