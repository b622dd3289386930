"""A run in several fresh processes, each of which contributes one repeat of every time.

All repeats within a process share accidents such as where its memory lies and what ran before, so
they cannot show how much these matter. Therefore each process times everything anew, in its own
random order. Sources: Kalibera and Jones 2013, "Rigorous Benchmarking in Reasonable Time";
Mytkowicz et al. 2009, "Producing Wrong Data Without Doing Anything Obviously Wrong!".

The C allocator of these processes keeps all memory that it was given. Otherwise earlier frees would
decide whether a matrix of up to 32 MB gets fresh pages, whose faults sometimes take a third of the
time of eager losses at N = 2,048.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import click

from fastsim.benchmark.cases import LARGEST_COMMON_SIZE
from fastsim.benchmark.parent import end_with_parent
from fastsim.benchmark.parts import Parts
from fastsim.benchmark.results import environment
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import LARGE_PROCESSES
from fastsim.environment import variables

# glibc reads these variables when a process starts; 32 MB is the largest threshold that it accepts.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_RATES = ("GFLOP/s", "GB/s", "G/s")  # those of the best repeat
_FIGURES = {"repeats ms", "median ms", "rounds", "not measured", *_RATES}


def run_in_processes(settings, *, progress=True, parts=None):
    """Yield (environment, rows) of all that is measured so far, after each process.

    Memory and errors are measured first, in this process. parts: `Parts` that keep what each
    process measured; a part that exists is not measured again.
    """
    about = environment(settings.device, asdict(settings)) | {"allocator": ALLOCATOR}
    parts = parts or Parts(None)
    others = tuple(measure for measure in settings.measures if measure != "time")
    other_rows = []
    if others:
        untimed = replace(settings, measures=others)
        other_rows = parts.load_or_measure(
            "others", about, lambda: run(untimed, progress=progress)[1]
        )
    if "time" not in settings.measures:
        yield about, other_rows
        return
    runs = []
    for index in range(settings.processes):
        if progress:
            click.echo(f"process {index + 1} of {settings.processes}", err=True)
        largest = None if index < LARGE_PROCESSES else LARGEST_COMMON_SIZE
        part = replace(settings, measures=("time",), largest=largest)
        runs.append(
            parts.load_or_measure(f"{index + 1}", about, lambda part=part: _fresh(part, progress))
        )
        yield about, joined(runs) + other_rows


def _fresh(settings, progress):
    """The rows of a run in a fresh process."""
    spawned = multiprocessing.get_context("spawn")
    with variables(ALLOCATOR), ProcessPoolExecutor(1, spawned, end_with_parent) as pool:
        return pool.submit(run, settings, progress=progress).result()[1]


def joined(runs):
    """The rows of several processes as one list; the repeats of a time are the best of each."""
    places = {}
    for rows in runs:
        for row in rows:
            place = tuple((name, row[name]) for name in row if name not in _FIGURES)
            places.setdefault(place, []).append(row)
    return [_joined(rows) for rows in places.values()]


def _joined(rows):
    timed = [row for row in rows if "repeats ms" in row]
    if not timed:
        return rows[0]
    common = {name: value for name, value in timed[0].items() if name != "median ms"}
    return common | {
        "repeats ms": [min(row["repeats ms"]) for row in timed],
        "rounds": sum(row["rounds"] for row in timed),
        **{rate: max(row[rate] for row in timed) for rate in _RATES if rate in common},
    }
