"""The options of `fastsim bench` on the command line."""

import click

from fastsim.benchmark.dtypes import DTYPES


class Integers(click.ParamType):
    """Positive integers with commas between."""

    name = "N,N,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            self.fail(f"wanted positive integers with commas between, got {value!r}", param, ctx)
        return numbers


_OPTIONS = (
    click.option(
        "--loss", "losses", multiple=True, help="A loss; default: all. A wrong name lists them."
    ),
    click.option(
        "--backend", "backends", multiple=True, help="Backends of fastsim; default: all but eager."
    ),
    click.option(
        "--baseline",
        "baselines",
        multiple=True,
        help="A baseline, or none; default: all that are installed.",
    ),
    click.option("--sizes", type=Integers(), default=(), help="N, the rows of each side."),
    click.option("--dim", "dims", type=Integers(), default=(), help="D, the width of the rows."),
    click.option(
        "--measure", "measures", multiple=True, help="time, memory or error; default: all three."
    ),
    click.option("--device", default="cpu", help="cpu or cuda."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Dtype of the embeddings; `autocast`: float32 within torch.autocast to bfloat16."
        " Default: float32 on a CPU, bfloat16 on a GPU.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(0),
        help="Fresh processes, each a repeat of everything. Default: 6.",
    ),
    click.option(
        "--seconds", default=0.5, help="Seconds of timing per loss, size, pass and process."
    ),
    click.option("--limit", default=15.0, help="Seconds beyond which a call is not made."),
    click.option(
        "--memory-limit", type=float, help="GB that a call may take; default: 16 or less."
    ),
    click.option("--quick", is_flag=True, help="Two small sizes, under a minute."),
    click.option("--out", metavar="FILE", help="JSON lines; a folder gets DEVICE/losses.jsonl."),
    click.option("--resume", is_flag=True, help="Continue an --out that was interrupted."),
    click.option("--overwrite", is_flag=True, help="Overwrite an existing --out."),
    click.option("--from", "source", metavar="FILE", help="Show an earlier run, measure nothing."),
    click.option(
        "--against", metavar="FILE", help="Show which ratios left the spread of that run."
    ),
    click.option("--progress/--no-progress", default=True),
)


def options(command):
    """The decorator that adds them all."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
