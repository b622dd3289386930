"""What `fastsim bench` does with its options."""

import math
import sys
from pathlib import Path

import click

from fastsim.benchmark import compare, results, tables
from fastsim.benchmark.duration import minutes
from fastsim.benchmark.parts import Parts
from fastsim.benchmark.processes import run_in_processes
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import MEASURES, PROCESSES, Settings
from fastsim.files import OutputError


def bench(
    *, source=None, against=None, out=None, resume=False, overwrite=False, progress=True, **options
):
    """Measure or read a run, show it, keep it, compare it; exit code 1 where ratios changed."""
    earlier = results.read(against) if against else None
    if out and Path(out).is_dir():
        out = Path(out) / results.device_name(options["device"]) / "losses.jsonl"
    if resume and not out:
        raise ValueError("resume: wanted the --out of the run that was broken off, got none")
    parts = Parts(out, resume=resume)
    if out and Path(out).exists() and not (resume or overwrite):
        raise OutputError(f"out: {str(out)!r} is there already; --overwrite writes over it")
    runs = [results.read(source)] if source else _measured(options, progress, parts)
    for about, rows in runs:
        if out:  # what there is so far, should the rest be broken off
            results.write(out, about, rows)
    parts.remove()
    click.echo(tables.text(about, rows))
    if out:
        click.echo(f"\nwrote {out}")
    if earlier:
        found = compare.shared(earlier, (about, rows))
        click.echo(f"\n{compare.text(found)}")
        sys.exit(1 if compare.changed(found) else 0)


def _measured(options, progress, parts):
    """(environment, rows) so far, again and again."""
    processes = options.pop("processes")
    if processes is None:
        processes = 0 if options["quick"] else PROCESSES
    options["measures"] = options["measures"] or MEASURES
    options["dtype"] = options["dtype"] or ""
    settings = Settings(processes=processes, **options)
    if progress:
        click.echo(f"about {math.ceil(minutes(settings))} minutes on a quiet machine", err=True)
    if processes:
        yield from run_in_processes(settings, progress=progress, parts=parts)
    else:
        yield run(settings, progress=progress)
