"""Shows the progress of a run on standard error: a bar on a terminal, otherwise lines."""

import sys
import time

import click

SECONDS = 15  # between lines in a log


def with_progress(steps, *, visible=True):
    """Yield the steps, each (weight, text, ...), and show the share of the weight that is done."""
    total = sum(weight for weight, *_ in steps)
    if not visible:
        yield from steps
    elif sys.stderr.isatty():
        yield from _bar(steps, total)
    else:
        yield from _lines(steps, total)


def _bar(steps, total):
    bar = click.progressbar(
        length=total,
        label="measuring",
        item_show_func=lambda text: text,
        show_pos=False,
        file=sys.stderr,
    )
    with bar:
        for step in steps:
            weight, text, *_ = step
            bar.update(0, text)
            yield step
            bar.update(weight, text)


def _lines(steps, total):
    done, last = 0, -SECONDS
    for step in steps:
        weight, text, *_ = step
        now = time.monotonic()
        if now - last >= SECONDS:
            click.echo(f"{done / total:4.0%}  {text}", err=True)
            last = now
        yield step
        done += weight
