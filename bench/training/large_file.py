"""How `fastsim train` reads a file of 2,000,000 rows: seconds until its header stands, memory.

Usage: python -m bench.training.large_file
Result: bench/results/training/large_file.json.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.training.real_data import RESULTS, ROOT
from fastsim.benchmark.results import environment


def write_pairs(path, rows):
    """Scored pairs of seven to thirteen words a side; no text is there twice."""
    random.seed(0)
    words = [f"word{number}" for number in range(5000)]
    parts = [" ".join(random.choices(words, k=6 + number % 7)) for number in range(10_000)]
    with open(path, "w", encoding="utf-8") as handle:
        handle.write("sentence1,sentence2,score\n")
        for row in range(rows):
            one, other = parts[row % 10_000], parts[row * 7 % 9_973]
            handle.write(f"{one} a{row},{other} b{row},{row % 6}\n")


def header_of(path, output):
    """What a run says before its first step, each line with its second; memory and time."""
    command = [sys.executable, "-m", "fastsim", "train", "--train", str(path), "--loss", "cosent"]
    command += ["--output", str(output), "--batch-size", "64", "--dry-run", "--cpu"]
    start, said = time.monotonic(), []
    running = subprocess.Popen(
        command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in running.stderr:
        line = line.strip().replace(f"{path.parent}/", "")
        said.append((round(time.monotonic() - start, 2), line))
    if running.wait():
        sys.exit("\n".join(line for _, line in said))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.monotonic() - start, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_MB": round(used.ru_maxrss / 1024),
        "said": [entry for entry in said if "Loading weights" not in entry[1]],
        "command": "fastsim " + " ".join(Path(part).name for part in command[3:]),
    }


@click.command()
@click.option("--rows", default=2_000_000, show_default=True)
def main(rows):
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.csv"
        write_pairs(path, rows)
        megabytes = round(path.stat().st_size / 1e6)
        found = header_of(path, Path(folder) / "model")
    for second, line in found["said"]:
        click.echo(f"{second:6.2f} s  {line}")
    click.echo(f"{found['processor_seconds']} s of the processor, {found['peak_MB']} MB at most")
    about = environment() | {"experiment": "large_file", "rows": rows, "file_MB": megabytes}
    (RESULTS / "large_file.json").write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
