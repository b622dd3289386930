"""The command line. Heavy packages, torch among them, are imported inside the commands."""

import json

import click

from fastsim import __version__
from fastsim.benchmark.options import options as bench_options
from fastsim.cli.command import Command, Rate, Text, quiet, refuse_combination, table
from fastsim.cli.evaluate import evaluate
from fastsim.cli.mine import mine
from fastsim.cli.options import (
    CORPUS_HELP,
    CPU,
    ENCODING_BATCH,
    MODEL_OPTION,
    PICKLE,
    SEARCH_PROMPT,
    SEED,
    TRUST,
)
from fastsim.cli.products import PRODUCTS
from fastsim.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="fastsim")
def main():
    """Fast, exact and memory-efficient losses for embedding models."""


main.command_class = Command


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for bug reports.")
def info(as_json):
    """Show versions, backends, devices and verified kernels.

    Example: fastsim info
    """
    from fastsim.cli.info import facts, report

    click.echo(json.dumps(facts(), indent=1) if as_json else report())


@main.command()
@click.option(
    "--device", metavar="NAME", default="cuda:0", help="GPU to check, by its name in torch."
)
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
    help="Kind of loss to check, such as softmax. An unknown name lists all kinds. May be repeated."
    " Default: all.",
)
@click.option(
    "--dtype",
    multiple=True,
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Dtype of the embeddings to check. May be repeated. Default: all.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="Number of checks at a time. Default: one per core, fewer if GPU memory is short.",
)
def verify(device, backend, kind, dtype, jobs):
    """Check and time the GPU kernels on this machine.

    Each combination of backend, kind of loss and dtype is checked in its own process. A check takes
    minutes, because it first compiles the kernels; several checks run at a time. Kernels are timed
    while no check runs. From then on, the kernels that are correct and faster than the torch
    backend are used by default, and no others.

    Example: fastsim verify --device cuda:0 --kind softmax --dtype bfloat16
    """
    from fastsim.cli.verify import lines

    for line in lines(device, backend, kind, dtype, jobs):
        click.echo(line)


@main.command()
@bench_options
def bench(**options):
    """Compare the losses with other implementations.

    Measures time, peak memory and numerical error.

    Example: fastsim bench --quick
    """
    if options["source"]:
        compatible = {"source", "against", "out", "resume", "overwrite", "progress"}
        refuse_combination(options.keys() - compatible, "--from")
    from fastsim.benchmark.command import bench as run

    run(**options)


main.add_command(train)
main.add_command(mine)
main.add_command(evaluate)


@main.command()
@MODEL_OPTION
@click.option("--corpus", required=True, metavar="FILE", help=f"Texts to search: {CORPUS_HELP}")
@click.option(
    "--query",
    required=True,
    multiple=True,
    type=Text(),
    help="Text to search for. May be repeated.",
)
@click.option(
    "--top-k", type=click.IntRange(1), metavar="NUMBER", default=5, help="Results per query."
)
@click.option(
    "--index",
    metavar="FILE",
    help="File for the embeddings of the corpus. They are reused while texts, model and prompt stay"
    " the same.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an index that was made from other texts, or with another model or prompt.",
)
@ENCODING_BATCH
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the same as --format json.")
@click.option(
    "--format",
    "shown",
    type=click.Choice(["text", "json"]),
    help="Format of the printed results. Default: text.",
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

    Scores are the model's own similarity, cosine or dot.

    Example: fastsim search --corpus notes.txt --query "how do I reset it" --top-k 5
    """
    quiet()
    from fastsim.training.data import read_corpus
    from fastsim.training.load import load_encoder, search_texts
    from fastsim.training.similarity import similarity_of

    if shown == "text":
        refuse_combination(("as_json",), "--format text")
    if overwrite and index is None:
        raise click.UsageError("--overwrite: needs --index, the file to replace")
    texts = read_corpus(corpus)
    encoder = load_encoder(model, cpu=cpu, prompts=prompts, **trust)
    vectors = None
    if index is not None:
        from fastsim.training.index import load_or_encode

        similarity_of(encoder)  # an unsupported one is refused before the corpus is encoded
        vectors = load_or_encode(encoder, texts, index, batch_size=batch_size, overwrite=overwrite)
    answers = search_texts(
        encoder, list(query), texts, top_k, batch_size=batch_size, corpus=vectors
    )
    if as_json or shown == "json":
        click.echo(json.dumps(answers))
        return
    for answer in answers:
        click.echo(answer["query"])
        for hit in answer["hits"]:
            click.echo(f"  {hit['score']:.3f}  {hit['text']}")


@main.command()
@MODEL_OPTION
@click.option(
    "--output", default="fastsim-demo", metavar="DIR", help="Folder for the trained model."
)
@SEED
@click.option("--progress/--no-progress", default=True, help="Print the progress of the training.")
@CPU
def demo(model, output, seed, progress, cpu):
    """Train the bundled model on a few sentences, as a trial.

    The sentences are hard for the model before training. Takes about a minute on two cores and
    needs no network.

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
    "--batch-size",
    type=click.IntRange(1),
    required=True,
    metavar="ROWS",
    help="Rows per batch, over all processes together.",
)
@click.option(
    "--dim",
    type=click.IntRange(1),
    metavar="WIDTH",
    help="Width of the embeddings. Default: the width of --model.",
)
@click.option(
    "--ranks", type=click.IntRange(1), default=1, metavar="PROCESSES", help="Number of processes."
)
@click.option(
    "--micro-batch-size",
    type=click.IntRange(1),
    default=64,
    metavar="TEXTS",
    help="Encode at most this many texts at a time (GradCache).",
)
@click.option(
    "--columns",
    type=click.IntRange(2),
    default=2,
    metavar="TEXTS",
    help="Texts per row: 2, and one more for each negative.",
)
@click.option(
    "--loss",
    type=click.Choice(list(PRODUCTS)),
    default="info_nce",
    help="Loss to plan for.",
)
@click.option(
    "--exchange",
    type=click.Choice(["gather", "ring"]),
    default="gather",
    help="How processes exchange candidates: gather them all, or pass them around a ring.",
)
@click.option(
    "--sharding",
    type=click.Choice(["none", "zero1", "zero2", "zero3", "fsdp"]),
    default="none",
    help="How the encoder is sharded over the processes: DeepSpeed's ZeRO 1, 2 or 3, or FSDP2.",
)
@click.option(
    "--bits", type=click.Choice(["16", "32"]), default="32", help="Bits per embedding element."
)
@click.option(
    "--tokens", type=click.IntRange(1), default=128, metavar="TOKENS", help="Tokens per text."
)
@click.option("--gpu", is_flag=True, help="Plan for GPUs, with the torch backend.")
@click.option(
    "--rate",
    type=Rate(),
    metavar="TFLOP/S",
    help="Arithmetic rate of one process in TFLOP/s. Default: measured on this machine's CPU, or"
    " with --gpu on its GPU, if it has one; otherwise no time is estimated.",
)
@click.option(
    "--bandwidth",
    type=Rate(),
    metavar="GB/S",
    help="Bandwidth between processes in GB/s. Default: the time of the exchange is left out.",
)
@click.option(
    "--memory-rate",
    type=Rate(),
    metavar="TB/S",
    help="Bandwidth of the device's memory in TB/s, to estimate the time of the loss by backend."
    " Default: no such estimate.",
)
@MODEL_OPTION
@PICKLE
def plan(model, dim, bits, rate, bandwidth, memory_rate, allow_pickle, **options):
    """Estimate the memory and the minimum time of a training step.

    Example: fastsim plan --batch-size 65536 --ranks 8 --gpu --bits 16 --rate 400
    """
    quiet()
    from fastsim.cli import plan as planning

    shape = planning.encoder_shape(model, allow_pickle=allow_pickle)
    shape["dim"] = dim or shape["dim"]
    step = planning.Plan(**options, bytes_each=int(bits) // 8, **shape)
    rate = rate * 1e12 if rate else planning.rate_here(step)
    click.echo(
        planning.report(
            step, rate, bandwidth and bandwidth * 1e9, memory_rate and memory_rate * 1e12
        )
    )
