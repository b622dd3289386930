"""What `fastsim bench` does with its options."""

import sys
from pathlib import Path

import click

from fastsim.benchmark import compare, results, tables
from fastsim.benchmark.processes import run_in_processes
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import MEASURES, PROCESSES, Settings


def bench(*, source=None, against=None, out=None, progress=True, **options):
    """Measure or read a run, show it, keep it, compare it; exit code 1 where ratios changed."""
    earlier = results.read(against) if against else None
    for about, rows in [results.read(source)] if source else _measured(options, progress):
        if out:  # what there is so far, should the rest be broken off
            path = Path(out)
            path = path / about["device"] / "losses.jsonl" if path.is_dir() else path
            results.write(path, about, rows)
    click.echo(tables.text(about, rows))
    if out:
        click.echo(f"\nwrote {path}")
    if earlier:
        found = compare.shared(earlier, (about, rows))
        click.echo(f"\n{compare.text(found)}")
        sys.exit(1 if compare.changed(found) else 0)


def _measured(options, progress):
    """(environment, rows) so far, again and again."""
    processes = options.pop("processes")
    if processes is None:
        processes = 0 if options["quick"] else PROCESSES
    options["measures"] = options["measures"] or MEASURES
    options["dtype"] = options["dtype"] or ""
    settings = Settings(processes=processes, **options)
    if processes:
        yield from run_in_processes(settings, progress=progress)
    else:
        yield run(settings, progress=progress)
