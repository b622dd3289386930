"""`fastsim mine`: pairs with hard negatives from a corpus."""

import click

from fastsim.cli.command import Command, quiet
from fastsim.cli.options import (
    COLUMNS_HELP,
    CORPUS_HELP,
    CPU,
    DATA_HELP,
    ENCODING_BATCH,
    MAX_LENGTH,
    MODEL_OPTION,
    PICKLE,
    SEARCH_PROMPT,
    SEED,
    TRUST,
    file_format,
)
from fastsim.training.counted import counted


@click.command(cls=Command, context_settings={"show_default": True})
@MODEL_OPTION
@click.option(
    "--pairs",
    required=True,
    metavar="FILE",
    help=f"Data with the columns anchor and positive: {DATA_HELP}",
)
@click.option(
    "--corpus",
    metavar="FILE",
    help=f"Further texts that may be negatives: {CORPUS_HELP} Default: only the positives of other"
    " pairs.",
)
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    help="File for the pairs with their negatives: JSON lines for fastsim train.",
)
@click.option("--overwrite", is_flag=True, help="Overwrite an existing --output file.")
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@file_format
@click.option(
    "--count", type=click.IntRange(1), metavar="NUMBER", default=1, help="Negatives per pair."
)
@click.option(
    "--first",
    type=click.IntRange(1),
    default=1,
    metavar="RANK",
    help="First neighbour that may be a negative; rank 1 is the nearest.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=30,
    metavar="RANK",
    help="Last neighbour that may be a negative.",
)
@click.option(
    "--margin",
    type=float,
    metavar="DIFFERENCE",
    help="A negative's similarity must be at least this much below the positive's. Default: no"
    " limit.",
)
@click.option(
    "--relative-margin",
    type=float,
    metavar="FRACTION",
    help="A negative's similarity must be below the positive's by at least this fraction of the"
    " positive's: 0.05 allows at most 95 % of it, as NV-Retriever does. Default: no limit.",
)
@click.option(
    "--sample",
    is_flag=True,
    help="Draw negatives at random from --first to --last, instead of taking the nearest.",
)
@SEED
@ENCODING_BATCH
@MAX_LENGTH
@SEARCH_PROMPT
@CPU
@TRUST
@PICKLE
def mine(model, pairs, output, overwrite, first, last, max_length, prompts, cpu, **options):
    """Find hard negatives for pairs.

    A hard negative is a text near the anchor that is not one of its positives. Texts are compared
    by the model's own similarity if that is cosine or dot, otherwise by cosine.

    Example: fastsim mine --pairs pairs.csv --output triplets.jsonl --first 5 --relative-margin 0.05
    """
    quiet()
    from fastsim.training.load import load_encoder
    from fastsim.training.mined import check_output, write_rows
    from fastsim.training.mined import mine as run

    if last - first + 1 < options["count"]:
        raise ValueError(
            f"--last: wanted at least {first + options['count'] - 1} for --first {first} and"
            f" --count {options['count']}, got {last}"
        )
    check_output(output, pairs, options["corpus"], overwrite=overwrite)
    trust = {name: options.pop(name) for name in ("trust_remote_code", "allow_pickle")}
    encoder = load_encoder(model, cpu=cpu, max_length=max_length, prompts=prompts, **trust)
    rows, left_out = run(encoder, pairs, ranks=(first, last), **options)
    negatives = counted(options["count"], "negative")
    if not rows:
        raise ValueError(
            f"pairs: wanted at least one pair with {negatives} within the limits, got none of"
            f" {left_out}; widen --first, --last, --margin or --relative-margin, or add texts"
            " with --corpus"
        )
    write_rows(rows, output, overwrite=overwrite)
    click.echo(f"{counted(len(rows), 'row')}: {click.format_filename(output)}")
    if left_out:
        pairs_left_out = counted(left_out, "pair")
        click.echo(
            f"left out {pairs_left_out} with fewer than {negatives} within the limits", err=True
        )
