"""The command line."""

import click

from fastsim.info import report


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """fastsim: losses of embedding models, fast, exact and small in memory."""


@main.command()
def info():
    """Show versions and backends, and why a backend is not usable here.

    Example: fastsim info
    """
    click.echo(report())
