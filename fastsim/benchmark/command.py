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
from fastsim.training.rows import DataError


def bench(
    *, source=None, against=None, out=None, resume=False, overwrite=False, progress=True, **options
):
    """Measure or read a run, show it, keep it, compare it; exit code 1 where ratios changed."""
    earlier = _read("against", against) if against else None
    read = _read("from", source) if source else None
    settings = None if read else _settings(**options)
    if resume and (read or not out):
        got = "--from" if read else "none"
        raise ValueError(f"resume: wanted the --out of the run that was broken off, got {got}")
    if out and Path(out).is_dir():
        device = read[0]["device"] if read else results.device_name(settings.device)
        out = Path(out) / device / "losses.jsonl"
    parts = Parts(out, resume=resume)
    if out:
        _check_out(Path(out), parts, resume=resume, overwrite=overwrite)
    for about, rows in [read] if read else _measured(settings, progress, parts):
        if out:  # what there is so far, should the rest be broken off
            _write(out, about, rows)
    parts.remove()
    click.echo(tables.text(about, rows))
    if out:
        click.echo(f"\nwrote {out}")
    if earlier:
        found = compare.shared(earlier, (about, rows))
        click.echo(f"\n{compare.text(found)}")
        sys.exit(1 if compare.changed(found) else 0)


def _settings(*, processes, measures, dtype, **options):
    if processes is None:
        processes = 0 if options["quick"] else PROCESSES
    return Settings(
        processes=processes, measures=measures or MEASURES, dtype=dtype or "", **options
    )


def _read(option, path):
    """The run in an option's file; `DataError` where there is none of which a table can be made."""
    try:
        run = results.read(path)
        tables.text(*run)
    except OSError as error:
        raise DataError(f"{option}: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        wanted = "wanted a result file of `fastsim bench`"
        raise DataError(f"{option}: {wanted}, got {str(path)!r}") from error
    return run


def _check_out(out, parts, *, resume, overwrite):
    """`OutputError` where the run may or can not be written, before it is measured."""
    why = _in_the_way(out, parts, resume)
    if why and not overwrite:
        raise OutputError(f"out: {str(out)!r} {why}; --overwrite writes over it")
    results.check_new("out", out)


def _in_the_way(out, parts, resume):
    """Why a file that is there is not to be written over, or None."""
    if not out.exists():
        return None
    if not resume:
        return "is there already"
    try:
        results.read(out)
    except (OSError, ValueError):
        return "is no run that was broken off"
    return None if parts.begun else "is complete already"


def _write(out, about, rows):
    """Keep a run; where that fails, its figures are on the terminal at least."""
    try:
        results.write(out, about, rows)
    except OSError:
        click.echo(tables.text(about, rows))
        raise


def _measured(settings, progress, parts):
    """(environment, rows) so far, again and again."""
    if parts.begun and not settings.processes:
        raise ValueError("processes: wanted as many as the run that was broken off, got 0")
    if progress:
        click.echo(f"about {math.ceil(minutes(settings))} minutes on a quiet machine", err=True)
    if settings.processes:
        yield from run_in_processes(settings, progress=progress, parts=parts)
    else:
        yield run(settings, progress=progress)
