"""What the commands of the command line are made of: errors as one line, types of options."""

import contextlib
import json
import math
import signal
import sys

import click

from fastsim.encoders.names import ModelError

# Exit codes: 0 done, 1 unforeseen, 2 options (also click's own), 3 data, 4 model, 5 output,
# 130 Ctrl-C.
FAILED, USAGE, DATA, MODEL, OUTPUT = 1, 2, 3, 4, 5
INTERRUPTED = 128 + signal.SIGINT


class Command(click.Command):
    """A command whose errors are one line and an exit code; a traceback only with --debug."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        text = "Show the traceback of an error."
        self.params.append(click.Option(["--debug"], is_flag=True, help=text))

    def invoke(self, ctx):
        debug = ctx.params.pop("debug")
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # `| head` has read enough: click ends without a word
            raise
        except KeyboardInterrupt:
            click.echo("Aborted!", err=True)  # as click says, whose exit code is 1
            sys.exit(INTERRUPTED)
        except Exception as error:
            if debug:
                raise
            text = error.strerror if isinstance(error, _output_error()) else None
            lines = (text or str(error)).strip().splitlines() or [""]
            named = isinstance(error, (ValueError, FloatingPointError, _output_error()))
            named = named or getattr(error, "signal", None)
            text = lines[0] if named else f"{type(error).__name__}: {lines[0]}"
            number = getattr(error, "signal", None)
            click.echo(text if number else f"Error: {text}", err=True)
            sys.exit(128 + number if number else _exit_code(error))


class Range(click.ParamType):
    """LOW,HIGH as two floats."""

    name = "LOW,HIGH"

    def convert(self, value, param, ctx):
        try:
            low, high = (float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"wanted two numbers LOW,HIGH, got {value!r}", param, ctx)
        return low, high


class Setting(click.ParamType):
    """NAME=VALUE; numbers and true/false become such."""

    name = "NAME=VALUE"

    def convert(self, value, param, ctx):
        name, sign, text = value.partition("=")
        if not (name and sign and text):
            self.fail(f"wanted NAME=VALUE, got {value!r}", param, ctx)
        with contextlib.suppress(ValueError):
            return name, json.loads(text)
        return name, text


class Text(click.ParamType):
    """A text that is not empty."""

    name = "TEXT"

    def convert(self, value, param, ctx):
        if not value.strip():
            self.fail("wanted a text, got an empty one", param, ctx)
        return _utf8(self, value, param, ctx)


class Rate(click.FloatRange):
    """A finite number above 0."""

    def __init__(self):
        super().__init__(0, min_open=True)

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"wanted a finite number, got {value!r}", param, ctx)
        return number


class Prompt(click.ParamType):
    """NAME=TEXT; the text as it stands, with its spaces."""

    name = "NAME=TEXT"

    def convert(self, value, param, ctx):
        name, sign, text = value.partition("=")
        if not (name and sign):
            self.fail(f"wanted NAME=TEXT, got {value!r}", param, ctx)
        return name, _utf8(self, text, param, ctx)


class Widths(click.ParamType):
    """W,W,... as ints."""

    name = "W,W,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            widths = tuple(int(part) for part in value.split(","))
        except ValueError:
            widths = ()
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            self.fail(f"wanted different whole numbers above 0, W,W,..., got {value!r}", param, ctx)
        return widths


def _utf8(kind, text, param, ctx):
    """A text of the command line; refused where its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        kind.fail(f"wanted a text in UTF-8, got {text!r}", param, ctx)
    return text


def by_name(ctx, param, pairs):
    """{name: value} of an option that may be repeated; a name that is there twice is refused."""
    found = {}
    for name, value in pairs:
        if name in found:
            text = f"wanted one value for {name}, got {found[name]!r} and {value!r}"
            raise click.BadParameter(text, ctx, param)
        found[name] = value
    return found


def check_unused(names, wanted, got):
    """UsageError where one of these parameters is given, which only count beside another option.

    wanted: that option; got: the one that is there instead.
    """
    ctx = click.get_current_context()
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name) != click.core.ParameterSource.DEFAULT
        if option.name in names and given:
            raise click.UsageError(f"{option.opts[0]}: wanted with {wanted}, got {got}")


def table(columns):
    """A table of metrics: one row per metric, one column per entry."""
    rows = list(next(iter(columns.values())))
    wide = max(len(row) for row in rows)
    heads = {name: max(len(name), 8) for name in columns}
    lines = [" " * wide + "".join(f"  {name:>{width}}" for name, width in heads.items())]
    for row in rows:
        cells = "".join(f"  {columns[name][row]:>{width}.4f}" for name, width in heads.items())
        lines.append(f"{row:<{wide}}{cells}")
    return "\n".join(lines)


def finite(metrics):
    """Metrics for JSON, which has no NaN: None in its place."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def quiet():
    """Silences libraries, so that only our own lines are shown; names a missing extra."""
    try:
        import datasets
        import transformers
    except ImportError as error:
        text = f"{error.name} is not installed: pip install 'fastsim-losses[train]'"
        raise click.ClickException(text) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _output_error():
    from fastsim.files import OutputError

    return OutputError


def _exit_code(error):
    from fastsim.files import is_full_disk
    from fastsim.training.data import DataError

    if is_full_disk(error):
        return OUTPUT
    kinds = ((DataError, DATA), (ModelError, MODEL), (OSError, OUTPUT), (ValueError, USAGE))
    return next((code for kind, code in kinds if isinstance(error, kind)), FAILED)
