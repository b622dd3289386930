"""The command line. Heavy packages, torch among them, are imported inside the commands."""

import json

import click

from fastsim import __version__
from fastsim.benchmark.options import options as bench_options
from fastsim.cli.command import Command, Rate, Text, check_unused, finite, quiet, table
from fastsim.cli.mine import mine
from fastsim.cli.options import (
    COLUMNS_HELP,
    CORPUS_HELP,
    CPU,
    ENCODED_AT_ONCE,
    FORMATS_HELP,
    MAX_LENGTH,
    MODEL_OPTION,
    PICKLE,
    PROMPT,
    SEARCH_PROMPT,
    SEED,
    TRUST,
    file_format,
)
from fastsim.cli.products import PRODUCTS
from fastsim.cli.train import train
from fastsim.training.counted import counted


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="fastsim")
def main():
    """fastsim: losses of embedding models, fast, exact and small in memory."""


main.command_class = Command


@main.command()
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON, for bug reports.")
def info(json_wanted):
    """Show versions, backends, devices, and what verify found.

    Example: fastsim info
    """
    from fastsim.cli.info import as_json, report

    click.echo(as_json() if json_wanted else report())


@main.command()
@click.option("--device", default="cuda:0", help="The GPU, as torch names it.")
@click.option(
    "--backend",
    multiple=True,
    type=click.Choice(["triton", "cuda"]),
    help="Backend to check. May be repeated. Default: both.",
)
@click.option(
    "--kind",
    multiple=True,
    metavar="NAME",
    help="Kind of loss to check, such as softmax; a wrong name lists them. May be repeated."
    " Default: all.",
)
@click.option(
    "--dtype",
    multiple=True,
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Dtype of the embeddings. May be repeated. Default: all.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Number of checks at once. Default: one per core, fewer if device memory is short.",
)
def verify(device, backend, kind, dtype, jobs):
    """Check and time the GPU kernels on this machine.

    Each backend, kind of loss and dtype is checked in a process of its own. It compiles its kernels
    first, so a check takes minutes; several run at once. Times are taken when no check runs.
    From then on, kernels that are right and faster than the torch backend are used by default;
    all others are not.

    Example: fastsim verify --device cuda:0 --kind softmax --dtype bfloat16
    """
    from fastsim.cli.verify import lines

    for line in lines(device, backend, kind, dtype, jobs):
        click.echo(line)


@main.command()
@bench_options
def bench(**options):
    """Compare the losses with other implementations.

    Time, peak memory and exactness.

    Example: fastsim bench --quick
    """
    if options["source"]:
        read = {"source", "against", "out", "resume", "overwrite", "progress"}
        check_unused(options.keys() - read, "a run that is measured", "--from")
    from fastsim.benchmark.command import bench as run

    run(**options)


main.add_command(train)
main.add_command(mine)


@main.command()
@MODEL_OPTION
@click.option(
    "--data",
    metavar="FILE",
    type=click.Path(),
    help=FORMATS_HELP,
)
@click.option(
    "--retrieval",
    metavar="DIR",
    help="Measure a search instead: a folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv,"
    " as BEIR's. It ranks by the similarity that the model's folder says, cosine or dot.",
)
@click.option("--split", default="test", metavar="NAME", help="The qrels file of --retrieval.")
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@file_format
@ENCODED_AT_ONCE
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
    """Measure a model on a file or on a retrieval set.

    The columns of the file decide the metrics.

    Example: fastsim evaluate --model model --data test.csv --columns sentence1,sentence2,score
    """
    quiet()
    if (data is None) == (retrieval is None):
        got = "neither" if data is None else "both"
        raise click.UsageError(f"wanted --data or --retrieval, got {got}")
    if retrieval is not None:
        check_unused(("columns", "kind", "delimiter", "header"), "--data", "--retrieval")
        from fastsim.training.beir import evaluate_retrieval
        from fastsim.training.load import load_encoder

        encoder = load_encoder(model, cpu=cpu, max_length=max_length, prompts=prompts, **trust)
        found = evaluate_retrieval(encoder, retrieval, split=split, batch_size=batch_size)
        if as_json:
            about = {"model": model, "retrieval": retrieval, "split": split}
            click.echo(json.dumps(about | finite(found)))
        else:
            click.echo(table({split: found}))
        return
    check_unused(("split",), "--retrieval", "--data")
    from fastsim.training.data import read_data
    from fastsim.training.load import evaluate_model

    dataset, layout = read_data(
        data, columns=columns, kind=kind, delimiter=delimiter, header=header
    )
    found = evaluate_model(
        model, dataset, layout, batch_size=batch_size, max_length=max_length, cpu=cpu,
        prompts=prompts, **trust,
    )  # fmt: skip
    if as_json:
        about = {"model": model, "data": data, "rows": len(dataset)}
        click.echo(json.dumps(about | finite(found)))
    else:
        click.echo(table({counted(len(dataset), "row"): found}))


@main.command()
@MODEL_OPTION
@click.option("--corpus", required=True, metavar="FILE", help=f"Texts to search in: {CORPUS_HELP}")
@click.option(
    "--query",
    required=True,
    multiple=True,
    type=Text(),
    help="Text to search for. May be repeated.",
)
@click.option("--top-k", type=click.IntRange(1), default=5, help="Results per query.")
@click.option(
    "--index",
    metavar="FILE",
    help="Keep the corpus's embeddings in this file, and reuse them while texts, model and prompt"
    " are the same.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an index of other texts or by another model or prompt.",
)
@ENCODED_AT_ONCE
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the same as --format json.")
@click.option(
    "--format",
    "shown",
    type=click.Choice(["text", "json"]),
    help="How the results are printed. Default: text.",
)
@SEARCH_PROMPT
@CPU
@TRUST
@PICKLE
def search(
    model,
    corpus,
    query,
    top_k,
    index,
    overwrite,
    batch_size,
    as_json,
    shown,
    prompts,
    cpu,
    **trust,
):
    """Find the texts of a file that are most similar to a query.

    Scores are the similarity that the model's folder says, cosine or dot.

    Example: fastsim search --corpus notes.txt --query "how do I reset it" --top-k 5
    """
    quiet()
    from fastsim.training.data import read_corpus
    from fastsim.training.load import load_encoder, search_texts
    from fastsim.training.similarity import similarity_of

    if shown == "text":
        check_unused(("as_json",), "--format json", "--format text")
    if overwrite and index is None:
        raise click.UsageError("--overwrite: wanted with --index, the file to replace")
    texts = read_corpus(corpus)
    encoder = load_encoder(model, cpu=cpu, prompts=prompts, **trust)
    known = None
    if index is not None:
        from fastsim.training.index import indexed

        similarity_of(encoder)  # refused before the work
        known = indexed(encoder, texts, index, batch_size=batch_size, overwrite=overwrite)
    answers = search_texts(encoder, list(query), texts, top_k, batch_size=batch_size, corpus=known)
    if as_json or shown == "json":
        click.echo(json.dumps(answers))
        return
    for answer in answers:
        click.echo(answer["query"])
        for hit in answer["hits"]:
            click.echo(f"  {hit['score']:.3f}  {hit['text']}")


@main.command()
@MODEL_OPTION
@click.option("--output", default="fastsim-demo", metavar="DIR", help="The trained model's folder.")
@SEED
@click.option("--progress/--no-progress", default=True, help="Print lines while it trains.")
@CPU
def demo(model, output, seed, progress, cpu):
    """Train the bundled model on a few sentences, as a trial.

    The sentences are hard for it at first. Takes about a minute on two cores, without a network.

    Example: fastsim demo
    """
    quiet()
    from fastsim.training import demo as show

    result, answers, seconds = show.run(
        model, output, seed=seed, progress=progress, cpu=cpu, say=click.echo
    )
    click.echo()
    click.echo(table({"before": result["before"], "after": result["after"]}))
    for when, hits in answers.items():
        click.echo(f"\n{when}: {hits[0]['query']}")
        for hit in hits[0]["hits"]:
            click.echo(f"  {hit['score']:.3f}  {hit['text']}")
    place = click.format_filename(output)
    click.echo(f"\n{seconds:.0f} s in all. Model: {place}; pictures: {place}/pictures")


@main.command()
@click.option(
    "--batch-size", type=click.IntRange(1), required=True, help="Rows over all processes."
)
@click.option(
    "--dim", type=click.IntRange(1), help="Width of the embeddings. Default: that of --model."
)
@click.option("--ranks", type=click.IntRange(1), default=1, help="Number of processes.")
@click.option(
    "--micro-batch-size", type=click.IntRange(1), default=64, help="Texts encoded at once."
)
@click.option(
    "--columns", type=click.IntRange(2), default=2, help="Texts per row: 2, plus 1 per negative."
)
@click.option(
    "--loss",
    type=click.Choice(list(PRODUCTS)),
    default="info_nce",
    help="Loss whose matrix products are counted.",
)
@click.option(
    "--exchange",
    type=click.Choice(["gather", "ring"]),
    default="gather",
    help="How the candidates of other processes are reached.",
)
@click.option(
    "--sharding",
    type=click.Choice(["none", "zero1", "zero2", "zero3", "fsdp"]),
    default="none",
    help="How processes share the encoder: DeepSpeed's ZeRO 1, 2 or 3, or FSDP2.",
)
@click.option(
    "--bits", type=click.Choice(["16", "32"]), default="32", help="Bits per number of an embedding."
)
@click.option("--tokens", type=click.IntRange(1), default=128, help="Tokens per text.")
@click.option("--gpu", is_flag=True, help="Plan for GPUs, with the torch backend.")
@click.option(
    "--rate",
    type=Rate(),
    help="TFLOP/s of one process. Default: measured on this CPU, with --gpu on the GPU here;"
    " without a GPU here --gpu then gives no time.",
)
@click.option(
    "--bandwidth",
    type=Rate(),
    help="GB/s between processes. Default: the time of the exchange is left out.",
)
@click.option(
    "--memory-rate",
    type=Rate(),
    help="TB/s of the device's memory, for an estimate of the loss by backend. Default: none.",
)
@MODEL_OPTION
def plan(model, dim, bits, rate, bandwidth, memory_rate, **options):
    """Show the memory and the least time of a training step.

    Example: fastsim plan --batch-size 65536 --ranks 8 --gpu --bits 16 --rate 400
    """
    quiet()
    from fastsim.cli import plan as planning

    shape = planning.encoder_shape(model)
    shape["dim"] = dim or shape["dim"]
    asked = planning.Plan(**options, bytes_each=int(bits) // 8, **shape)
    rate = rate * 1e12 if rate else planning.rate_here(asked)
    click.echo(
        planning.report(
            asked, rate, bandwidth and bandwidth * 1e9, memory_rate and memory_rate * 1e12
        )
    )
