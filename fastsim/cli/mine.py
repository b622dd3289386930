"""`fastsim mine`: pairs with hard negatives from a corpus."""

import click

from fastsim.cli.command import Command, quiet
from fastsim.cli.options import (
    COLUMNS_HELP,
    CORPUS_HELP,
    CPU,
    ENCODED_AT_ONCE,
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
    help="Data with the columns anchor and positive, in the formats of fastsim train.",
)
@click.option(
    "--corpus",
    metavar="FILE",
    help=f"Texts that may be negatives beside the positives: {CORPUS_HELP}",
)
@click.option(
    "--output", required=True, metavar="FILE", help="New file: JSON lines, ready for training."
)
@click.option("--overwrite", is_flag=True, help="Overwrite an existing output file.")
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@file_format
@click.option("--count", type=click.IntRange(1), default=1, help="Negatives per pair.")
@click.option(
    "--first",
    type=click.IntRange(1),
    default=1,
    metavar="RANK",
    help="Rank of the nearest neighbour that may be a negative; 1 is the nearest of all.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    default=30,
    metavar="RANK",
    help="Rank of the farthest neighbour that may be a negative.",
)
@click.option(
    "--margin",
    type=float,
    metavar="COSINE",
    help="A negative's cosine is at most the positive's minus this margin. Default: no limit.",
)
@click.option(
    "--relative-margin",
    type=float,
    metavar="SHARE",
    help="A negative's cosine is below the positive's by at least this share of it; 0.05 is"
    " NV-Retriever's 95 %. Default: no limit.",
)
@click.option("--sample", is_flag=True, help="Draw from the ranks instead of taking the hardest.")
@SEED
@ENCODED_AT_ONCE
@MAX_LENGTH
@SEARCH_PROMPT
@CPU
@TRUST
@PICKLE
def mine(model, pairs, output, overwrite, first, last, max_length, prompts, cpu, **options):
    """Find hard negatives for pairs.

    A hard negative is close to the anchor but is not one of its positives.

    Example: fastsim mine --pairs pairs.csv --output triplets.jsonl --first 5 --relative-margin 0.05
    """
    quiet()
    from fastsim.training.load import load_encoder
    from fastsim.training.mined import check_output, write_rows
    from fastsim.training.mined import mine as run

    if last - first + 1 < options["count"]:
        raise ValueError(
            f"--last: wanted at least {first + options['count'] - 1}, for --count"
            f" {options['count']} from rank {first} on, got {last}"
        )
    check_output(output, pairs, options["corpus"], overwrite=overwrite)
    trust = {name: options.pop(name) for name in ("trust_remote_code", "allow_pickle")}
    encoder = load_encoder(model, cpu=cpu, max_length=max_length, prompts=prompts, **trust)
    rows, left_out = run(encoder, pairs, ranks=(first, last), **options)
    wanted = counted(options["count"], "negative")
    if not rows:
        raise ValueError(
            f"pairs: none of {left_out} has {wanted} within the limits; widen --first, --last,"
            " --margin or --relative-margin"
        )
    write_rows(rows, output)
    click.echo(f"{counted(len(rows), 'row')}: {click.format_filename(output)}")
    if left_out:
        said = f"left out {counted(left_out, 'pair')} with fewer than {wanted} within the limits"
        click.echo(said, err=True)
