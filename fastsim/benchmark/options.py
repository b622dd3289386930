"""The options of `fastsim bench` on the command line."""

import click

from fastsim.benchmark.dtypes import DTYPES


class Integers(click.ParamType):
    """N,N,...: positive integers."""

    name = "N,N,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            self.fail(f"wanted positive integers N,N,..., got {value!r}", param, ctx)
        return numbers


_OPTIONS = (
    click.option(
        "--loss",
        "losses",
        multiple=True,
        metavar="NAME",
        help="Loss to measure. An unknown name lists all losses. May be repeated. Default: all.",
    ),
    click.option(
        "--backend",
        "backends",
        multiple=True,
        metavar="NAME",
        help="Backend of fastsim to measure. May be repeated. Default: all except eager, and except"
        " torch on a CPU that has a faster one.",
    ),
    click.option(
        "--baseline",
        "baselines",
        multiple=True,
        metavar="NAME",
        help="Other implementation to measure, or none. An unknown name lists all baselines. May be"
        " repeated. Default: all that are installed.",
    ),
    click.option(
        "--sizes",
        type=Integers(),
        default=(),
        help="Batch sizes: rows of each side. Default: set by the loss.",
    ),
    click.option(
        "--dim",
        "dims",
        type=Integers(),
        default=(),
        help="Widths of the embeddings. Default: set by the loss.",
    ),
    click.option(
        "--measure",
        "measures",
        multiple=True,
        metavar="NAME",
        help="What to measure: time, memory or error. May be repeated. Default: all three.",
    ),
    click.option(
        "--device", default="cpu", metavar="NAME", help="Device to measure on: cpu or cuda."
    ),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Dtype of the embeddings; autocast: float32 under torch.autocast to bfloat16."
        " Default: float32 on a CPU, bfloat16 on a GPU.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(0),
        metavar="NUMBER",
        help="Number of fresh processes, each of which times everything once; 0: time in this"
        " process. Default: 6, with --quick 0.",
    ),
    click.option(
        "--seconds",
        default=0.5,
        metavar="SECONDS",
        help="Time to spend per loss, size, pass and process.",
    ),
    click.option(
        "--limit",
        default=15.0,
        metavar="SECONDS",
        help="Skip calls that are expected to take longer than this.",
    ),
    click.option(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="Memory that a call may take, in GB of 2^30 bytes. Default: 16, or 80 % of all memory"
        " if that is less.",
    ),
    click.option("--quick", is_flag=True, help="Measure only two small sizes, in under a minute."),
    click.option(
        "--out",
        metavar="FILE",
        help="File for the results, in JSON lines; in a folder: DEVICE/losses.jsonl.",
    ),
    click.option("--resume", is_flag=True, help="Continue the interrupted run of --out."),
    click.option("--overwrite", is_flag=True, help="Overwrite an existing --out file."),
    click.option(
        "--from",
        "source",
        metavar="FILE",
        help="Show the results in this file instead of measuring.",
    ),
    click.option(
        "--against",
        metavar="FILE",
        help="List the ratios that differ from those in this file by more than their spread; exit"
        " code 1 if there are any.",
    ),
    click.option("--progress/--no-progress", default=True, help="Show the progress of the run."),
)


def options(command):
    """Adds all of these options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
