"""The command `fastsim bench`, from its options to its output."""

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
    """Measure or read a run, then show, write and compare it; exit code 1 if ratios changed."""
    earlier = _read("against", against) if against else None
    finished = _read("from", source) if source else None
    settings = None if finished else _settings(**options)
    if resume and (finished or not out):
        got = "--from" if finished else "none"
        raise ValueError(f"resume: wanted the --out of the interrupted run, got {got}")
    if out and Path(out).is_dir():
        device = finished[0]["device"] if finished else results.device_name(settings.device)
        out = Path(out) / device / "losses.jsonl"
    parts = Parts(out, resume=resume)
    if out:
        _check_out(Path(out), parts, resume=resume, overwrite=overwrite)
    for about, rows in [finished] if finished else _measured(settings, progress, parts):
        if out:  # the results so far, in case the rest is interrupted
            _write(out, about, rows)
    parts.remove()
    click.echo(tables.text(about, rows))
    if out:
        click.echo(f"\nwrote {out}")
    if earlier:
        ratios = compare.shared(earlier, (about, rows))
        click.echo(f"\n{compare.text(ratios)}")
        sys.exit(1 if compare.changed(ratios) else 0)


def _settings(*, processes, measures, dtype, **options):
    if processes is None:
        processes = 0 if options["quick"] else PROCESSES
    return Settings(
        processes=processes, measures=measures or MEASURES, dtype=dtype or "", **options
    )


def _read(option, path):
    """The run in the file of an option; `DataError` if no table can be made from the file."""
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
    """`OutputError`, before anything is measured, if the file must not or cannot be written."""
    reason = _keep_reason(out, parts, resume)
    if reason and not overwrite:
        raise OutputError(f"out: {str(out)!r} {reason}; --overwrite replaces it")
    results.check_new("out", out)


def _keep_reason(out, parts, resume):
    """The reason to keep an existing file, or None."""
    if not out.exists():
        return None
    if not resume:
        return "exists already"
    try:
        results.read(out)
    except (OSError, ValueError):
        return "is not an interrupted run"
    return None if parts.started else "is complete already"


def _write(out, about, rows):
    """Write a run; if that fails, at least show its figures on the terminal."""
    try:
        results.write(out, about, rows)
    except OSError:
        click.echo(tables.text(about, rows))
        raise


def _measured(settings, progress, parts):
    """Yields (environment, rows) of all that has been measured so far, as it grows."""
    if parts.started and not settings.processes:
        raise ValueError("processes: wanted as many as in the interrupted run, got 0")
    if progress:
        click.echo(f"about {math.ceil(minutes(settings))} minutes on a quiet machine", err=True)
    if settings.processes:
        yield from run_in_processes(settings, progress=progress, parts=parts)
    else:
        yield run(settings, progress=progress)
