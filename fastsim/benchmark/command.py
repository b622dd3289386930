"""What `fastsim bench` does with its options."""

import sys
from pathlib import Path

import click

from fastsim.benchmark import compare, results, tables
from fastsim.benchmark.joined import joined
from fastsim.benchmark.run import run
from fastsim.benchmark.settings import MEASURES, Settings


def bench(*, source=None, more=None, against=None, out=None, progress=True, **options):
    """Measure or read a run, show it, keep it, compare it; exit code 1 where ratios changed."""
    earlier = results.read(against) if against else None
    added = results.read(more) if more else None
    if source:
        about, rows = results.read(source)
    else:
        options["measures"] = options["measures"] or MEASURES
        options["dtype"] = options["dtype"] or ""
        about, rows = run(Settings(**options), progress=progress)
    if added:
        about, rows = joined(added, (about, rows))
    if out:
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
