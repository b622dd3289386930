"""A run in several fresh processes: each gives one repeat of every time.

Repeats within a process share its luck, such as where its memory lies and what ran before, and say
nothing of it; so each process times everything anew, in an order of its own. Sources: Kalibera and
Jones 2013, "Rigorous Benchmarking in Reasonable Time"; Mytkowicz et al. 2009, "Producing Wrong Data
Without Doing Anything Obviously Wrong!".

The C allocator of these processes keeps what it has been given. Else it depends on what was freed
before whether a matrix of up to 32 MB comes in fresh pages: now and then, a third of the time of
eager losses at N = 2,048.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import click

from fastsim.benchmark.cases import UP_TO
from fastsim.benchmark.parent import end_with_parent
from fastsim.benchmark.parts import Parts
from fastsim.benchmark.results import environment
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import LARGE_IN
from fastsim.environment import variables

# Read by glibc when a process starts; 32 MB is the most that it takes as a threshold.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_RATES = ("GFLOP/s", "GB/s", "G/s")  # of the best repeat
_FIGURES = {"repeats ms", "median ms", "rounds", "not measured", *_RATES}


def run_in_processes(settings, *, progress=True, parts=None):
    """Yield (environment, rows) of all so far, after the first process and each that follows.

    What is not timed is measured in this process, before all. parts: `Parts` that keep what each
    process measured; what is there already is not measured again.
    """
    about = environment(settings.device, asdict(settings)) | {"allocator": ALLOCATOR}
    parts = parts or Parts(None)
    others = tuple(measure for measure in settings.measures if measure != "time")
    rest = []
    if others:
        untimed = replace(settings, measures=others)
        rest = parts.kept("others", about, lambda: run(untimed, progress=progress)[1])
    if "time" not in settings.measures:
        yield about, rest
        return
    runs = []
    for index in range(settings.processes):
        if progress:
            click.echo(f"process {index + 1} of {settings.processes}", err=True)
        largest = None if index < LARGE_IN else UP_TO
        part = replace(settings, measures=("time",), largest=largest)
        runs.append(parts.kept(f"{index + 1}", about, lambda part=part: _fresh(part, progress)))
        yield about, joined(runs) + rest


def _fresh(settings, progress):
    """The rows of a run in a process of its own."""
    spawned = multiprocessing.get_context("spawn")
    with variables(ALLOCATOR), ProcessPoolExecutor(1, spawned, end_with_parent) as pool:
        return pool.submit(run, settings, progress=progress).result()[1]


def joined(runs):
    """Rows of several processes as one list: a time's repeats are the best of each process."""
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
    both = {name: value for name, value in timed[0].items() if name != "median ms"}
    return both | {
        "repeats ms": [min(row["repeats ms"]) for row in timed],
        "rounds": sum(row["rounds"] for row in timed),
        **{rate: max(row[rate] for row in timed) for rate in _RATES if rate in both},
    }
