"""How `fastsim train` reads a file of 2,000,000 rows: seconds until its header stands, memory.

As scored pairs, and as pairs whose equal texts are looked for so that batches keep them apart. The
peak counts what is mapped from the file of Arrow, which the system takes back when it is short.

Usage: python -m bench.training.large_file
Result: bench/results/training/large_file.json.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.training.folders import RESULTS, ROOT
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


def header_of(path, output, loss, columns):
    """What a run says before its first step, each line with its second; memory and time."""
    command = [sys.executable, "-m", "fastsim", "train", "--train", str(path), "--loss", loss]
    command += ["--output", str(output), "--batch-size", "64", "--dry-run", "--cpu"]
    command += ["--columns", columns] if columns else []
    start, said = time.monotonic(), []
    running = subprocess.Popen(
        command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in running.stderr:
        line = line.strip().replace(f"{path.parent}/", "")
        said.append((round(time.monotonic() - start, 2), line))
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        sys.exit("\n".join(line for _, line in said))
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
        found = header_of(path, Path(folder) / "model", "cosent", None)
        pairs = header_of(
            path, Path(folder) / "model", "info_nce", "anchor=sentence1,positive=sentence2"
        )
    for run in (found, pairs):
        for second, line in run["said"]:
            click.echo(f"{second:6.2f} s  {line}")
        click.echo(f"{run['processor_seconds']} s of the processor, {run['peak_MB']} MB at most")
    about = environment() | {"experiment": "large_file", "rows": rows, "file_MB": megabytes}
    (RESULTS / "large_file.json").write_text(
        json.dumps(about | found | {"pairs": pairs}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
