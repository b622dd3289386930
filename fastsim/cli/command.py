"""What the commands share: errors on one line, exit codes, types of options, tables."""

import contextlib
import json
import math
import signal
import sys

import click

from fastsim.encoders.names import ModelError

# Exit codes: 0 success, 1 any other error, 2 options (click's own code), 3 data, 4 model,
# 5 output, 130 Ctrl-C.
FAILED, USAGE, DATA, MODEL, OUTPUT = 1, 2, 3, 4, 5
INTERRUPTED = 128 + signal.SIGINT


class Command(click.Command):
    """A command that reports errors on one line with an exit code; --debug adds the traceback."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        help_text = "Show the traceback of an error."
        self.params.append(click.Option(["--debug"], is_flag=True, help=help_text))

    def invoke(self, ctx):
        debug = ctx.params.pop("debug")
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # as of `| head`: click exits silently
            raise
        except KeyboardInterrupt:
            click.echo("Aborted!", err=True)  # click's own message; its exit code would be 1
            sys.exit(INTERRUPTED)
        except Exception as error:
            if debug:
                raise
            number = getattr(error, "signal", None)
            message = _first_line(error)
            click.echo(message if number else f"Error: {message}", err=True)
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
    """NAME=VALUE; a value that is JSON, such as a number or true, becomes a Python value."""

    name = "NAME=VALUE"

    def convert(self, value, param, ctx):
        name, sign, text = value.partition("=")
        if not (name and sign and text):
            self.fail(f"wanted NAME=VALUE, got {value!r}", param, ctx)
        with contextlib.suppress(ValueError):
            return name, json.loads(text)
        return name, text


class Text(click.ParamType):
    """A non-empty text."""

    name = "TEXT"

    def convert(self, value, param, ctx):
        if not value.strip():
            self.fail(f"wanted a non-empty text, got {value!r}", param, ctx)
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
    """NAME=TEXT; spaces in the text are kept."""

    name = "NAME=TEXT"

    def convert(self, value, param, ctx):
        name, sign, text = value.partition("=")
        if not (name and sign):
            self.fail(f"wanted NAME=TEXT, got {value!r}", param, ctx)
        return name, _utf8(self, text, param, ctx)


class Widths(click.ParamType):
    """W,W,...: distinct positive ints."""

    name = "W,W,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            widths = tuple(int(part) for part in value.split(","))
        except ValueError:
            widths = ()
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            self.fail(f"wanted distinct positive integers W,W,..., got {value!r}", param, ctx)
        return widths


def _first_line(error):
    """The message of an error on one line, with the type of an error that is not one of ours."""
    text = error.strerror if isinstance(error, _output_error()) else None
    line = ((text or str(error)).strip().splitlines() or [""])[0]
    ours = isinstance(error, (ValueError, FloatingPointError, _output_error()))
    if ours or getattr(error, "signal", None):
        return line
    return f"{type(error).__name__}: {line}"


def _utf8(param_type, text, param, ctx):
    """A text of the command line; refused if its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        param_type.fail(f"wanted a text in UTF-8, got {text!r}", param, ctx)
    return text


def by_name(ctx, param, pairs):
    """{name: value} of an option that may be repeated, with each name at most once."""
    values = {}
    for name, value in pairs:
        if name in values:
            text = f"wanted one value for {name}, got {values[name]!r} and {value!r}"
            raise click.BadParameter(text, ctx, param)
        values[name] = value
    return values


def refuse_combination(names, other):
    """UsageError if one of these parameters is given, which cannot be combined with `other`."""
    ctx = click.get_current_context()
    for option in ctx.command.params:
        is_given = ctx.get_parameter_source(option.name) != click.core.ParameterSource.DEFAULT
        if option.name in names and is_given:
            raise click.UsageError(f"{option.opts[0]}: cannot be combined with {other}")


def table(columns):
    """A table of metrics: one row per metric, one column per entry of {head: {metric: value}}."""
    metrics = list(next(iter(columns.values())))
    first_width = max(len(metric) for metric in metrics)
    widths = {head: max(len(head), 8) for head in columns}
    lines = [" " * first_width + "".join(f"  {head:>{width}}" for head, width in widths.items())]
    for metric in metrics:
        cells = "".join(f"  {columns[head][metric]:>{width}.4f}" for head, width in widths.items())
        lines.append(f"{metric:<{first_width}}{cells}")
    return "\n".join(lines)


def finite(metrics):
    """Metrics for JSON, with None in place of NaN and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def quiet():
    """Silences transformers and datasets; ClickException that names a missing package."""
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
