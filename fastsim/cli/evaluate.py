"""`fastsim evaluate`: the metrics of a model on a data file or on retrieval data."""

import json

import click

from fastsim.cli.command import Command, finite, quiet, refuse_combination, table
from fastsim.cli.options import (
    COLUMNS_HELP,
    CPU,
    DATA_HELP,
    ENCODING_BATCH,
    MAX_LENGTH,
    MODEL_OPTION,
    PICKLE,
    PROMPT,
    TRUST,
    file_format,
)
from fastsim.training.counted import counted


@click.command(cls=Command, context_settings={"show_default": True})
@MODEL_OPTION
@click.option(
    "--data",
    metavar="FILE",
    type=click.Path(),
    help=f"Evaluation data: {DATA_HELP}",
)
@click.option(
    "--retrieval",
    metavar="DIR",
    help="Retrieval data, in place of --data: a folder in BEIR's layout, with corpus.jsonl,"
    " queries.jsonl and qrels/SPLIT.tsv. Documents are ranked by the model's own similarity, cosine"
    " or dot.",
)
@click.option(
    "--split",
    default="test",
    metavar="NAME",
    help="Split of --retrieval: the name of a qrels file.",
)
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@file_format
@ENCODING_BATCH
@MAX_LENGTH
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@PROMPT
@CPU
@TRUST
@PICKLE
def evaluate(
    model,
    data,
    retrieval,
    split,
    columns,
    kind,
    delimiter,
    header,
    batch_size,
    max_length,
    as_json,
    cpu,
    prompts,
    **trust,
):
    """Evaluate a model on a data file or on retrieval data.

    The columns of the file determine the metrics. Metrics of the model's own similarity come first.
    Texts are ranked by this similarity if it is cosine or dot, otherwise by cosine.

    Example: fastsim evaluate --model model --data test.csv --columns sentence1,sentence2,score
    """
    quiet()
    if (data is None) == (retrieval is None):
        got = "neither" if data is None else "both"
        raise click.UsageError(f"wanted either --data or --retrieval, got {got}")
    if retrieval is not None:
        refuse_combination(("columns", "kind", "delimiter", "header"), "--retrieval")
        from fastsim.training.beir import evaluate_retrieval
        from fastsim.training.load import load_encoder

        encoder = load_encoder(model, cpu=cpu, max_length=max_length, prompts=prompts, **trust)
        metrics = evaluate_retrieval(encoder, retrieval, split=split, batch_size=batch_size)
        if as_json:
            about = {"model": model, "retrieval": retrieval, "split": split}
            click.echo(json.dumps(about | finite(metrics)))
        else:
            click.echo(table({split: metrics}))
        return
    refuse_combination(("split",), "--data")
    from fastsim.training.data import read_data
    from fastsim.training.load import evaluate_model

    dataset, layout = read_data(
        data, columns=columns, kind=kind, delimiter=delimiter, header=header
    )
    metrics = evaluate_model(
        model, dataset, layout, batch_size=batch_size, max_length=max_length, cpu=cpu,
        prompts=prompts, **trust,
    )  # fmt: skip
    if as_json:
        about = {"model": model, "data": data, "rows": len(dataset)}
        click.echo(json.dumps(about | finite(metrics)))
    else:
        click.echo(table({counted(len(dataset), "row"): metrics}))
