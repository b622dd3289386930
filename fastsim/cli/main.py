"""The command line. Heavy packages are imported inside the commands that need them."""

import json

import click

from fastsim.benchmark.options import options as bench_options
from fastsim.cli.command import Command, Range, Setting, table
from fastsim.cli.info import as_json, report
from fastsim.cli.plan import PRODUCTS
from fastsim.encoders.encoder import EMBEDDED, POOLINGS


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main():
    """fastsim: losses of embedding models, fast, exact and small in memory."""


main.command_class = Command


@main.command()
@click.option("--json", "json_wanted", is_flag=True, help="For bug reports.")
def info(json_wanted):
    """Show versions, backends and devices, and what verify found on them.

    Example: fastsim info
    """
    click.echo(as_json() if json_wanted else report())


@main.command()
@click.option("--device", default="cuda:0", help="As torch names it.")
@click.option(
    "--backend", multiple=True, type=click.Choice(["triton", "cuda"]), help="Both, if not given."
)
def verify(device, backend):
    """Check the GPU kernels on this machine's own device, and time them.

    Each backend, kind of loss and dtype in a process of its own. What is right and faster than
    plain torch is from then on taken by default; everything else is not.

    Example: fastsim verify --device cuda:0
    """
    from fastsim.cli.verify import lines

    for line in lines(device, backend):
        click.echo(line)


@main.command()
@bench_options
def bench(**options):
    """Measure the losses beside what else computes them: time, peak memory, exactness.

    Example: fastsim bench --quick
    """
    from fastsim.benchmark.command import bench as run

    run(**options)


MODEL_OPTION = click.option(
    "--model", default=EMBEDDED, help="Folder, hub name, or the embedded model."
)
COLUMNS_HELP = "Roles in the file's order, or role=name,... for a header of other names."
FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "tsv", "jsonl", "parquet"]),
    help="Of the data files, where their suffix does not say.",
)
TRUST = click.option("--trust-remote-code", is_flag=True, help="Run code from the model's folder.")
PICKLE = click.option("--allow-pickle", is_flag=True, help="Read weights that are no safetensors.")
CPU = click.option("--cpu", is_flag=True, help="Use the CPU though there is a GPU.")


@main.command()
@MODEL_OPTION
@click.option("--train", required=True, metavar="FILE", help="CSV, TSV, JSON lines or Parquet.")
@click.option("--eval", metavar="FILE", help="Data for the metrics and the choice of the best.")
@click.option("--loss", required=True, help="A wrong name lists those that fit the columns.")
@click.option("--output", required=True, metavar="DIR", help="The model's folder.")
@click.option("--columns", help=COLUMNS_HELP)
@click.option("--eval-columns", help="The same for --eval; as --columns by default.")
@FORMAT
@click.option("--score-range", type=Range(), help="Scores in LOW..HIGH become 0..1.")
@click.option(
    "--architecture", type=click.Choice(["bi-encoder", "cross-encoder"]), default="bi-encoder"
)
@click.option("--pooling", type=click.Choice(list(POOLINGS)), help="Instead of the model's.")
@click.option("--dense", type=click.IntRange(1), help="Width of a new layer after the pooling.")
@click.option("--loss-option", "loss_options", type=Setting(), multiple=True, help="Of the loss.")
@click.option("--learn", multiple=True, help="A loss option to learn: temperature, scale, bias.")
@click.option("--loss-learning-rate", type=click.FloatRange(0), help="Of the loss's parameters.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), default=1.0)
@click.option("--max-steps", type=click.IntRange(1), help="Instead of --epochs.")
@click.option("--batch-size", type=click.IntRange(1), default=32, help="Over all processes.")
@click.option("--micro-batch-size", type=click.IntRange(1), help="Texts encoded at once; all.")
@click.option("--accumulate", type=click.IntRange(1), default=1, help="Batches per step.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=5e-5)
@click.option("--warmup", type=click.FloatRange(0), default=0.1, help="Share below 1, or steps.")
@click.option("--schedule", default="linear", help="Of transformers: linear, cosine, constant...")
@click.option("--weight-decay", type=click.FloatRange(0), default=0.0)
@click.option("--max-length", type=click.IntRange(1), help="Tokens per text.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--eval-steps", type=click.IntRange(1), help="Evaluate so often; each epoch.")
@click.option("--checkpoint-steps", type=click.IntRange(1), help="Save so often; each epoch.")
@click.option(
    "--checkpoint-minutes",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    metavar="MINUTES",
    help="Write a checkpoint after so many minutes of training too.",
)
@click.option(
    "--checkpoints",
    metavar="DIR",
    help="The checkpoints' folder. Default: OUTPUT-checkpoints beside the output; inside it where"
    " nothing can be written beside it.",
)
@click.option("--keep-checkpoints", is_flag=True, help="Keep the checkpoints of a finished run.")
@click.option("--logging-steps", type=click.IntRange(1), default=10)
@click.option("--best-metric", help="Chooses the best model; by default the format's own.")
@click.option("--early-stopping", type=click.IntRange(1), help="Evaluations without progress.")
@click.option("--report-to", default="none", help="tensorboard, wandb, ..., all.")
@click.option("--resume", is_flag=True, help="Go on from the last whole checkpoint.")
@click.option("--overwrite", is_flag=True, help="Begin anew over an earlier run's checkpoints.")
@click.option("--progress/--no-progress", default=True)
@CPU
@TRUST
@PICKLE
def train(**options):
    """Train an encoder on a file of sentences.

    The columns decide the losses: (sentence1, sentence2, score) cosent, angle, cosine_regression;
    (anchor, positive[, negative, ...]) info_nce, full_triplet, siglip, triplet_margin; (sentence1,
    sentence2, label) classification; (text, label) siglip, matrix_mse, matrix_cross_entropy,
    cosent_matrix, sup_con, nt_xent, multi_similarity, batch_hard_triplet. A cross-encoder takes
    pairs: cosent, cross_entropy, regression. Rows with equal values in a column `together` come
    into one batch.

    Example: fastsim train --train train.csv --eval dev.csv --loss cosent --output model
    --columns sentence1,sentence2,score
    """
    _quiet()
    from accelerate import PartialState

    from fastsim.training.run import Options
    from fastsim.training.run import train as run

    options["loss_options"] = dict(options["loss_options"])
    result = run(Options(**options))
    if not PartialState().is_main_process:
        return
    if result["after"]:
        columns = {"before": result["before"], "after": result["after"]}
        click.echo(table(columns))
    click.echo(f"{result['steps']} steps in {result['seconds']:.0f} s: {options['output']}")


@main.command()
@MODEL_OPTION
@click.option("--data", required=True, metavar="FILE", help="CSV, TSV, JSON lines or Parquet.")
@click.option("--columns", help=COLUMNS_HELP)
@FORMAT
@click.option("--batch-size", type=click.IntRange(1), default=32)
@click.option("--max-length", type=click.IntRange(1), help="Tokens per text.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@CPU
@TRUST
@PICKLE
def evaluate(model, data, columns, kind, batch_size, max_length, as_json, cpu, **trust):
    """Measure a model on a file; the columns decide the metrics.

    Example: fastsim evaluate --model model --data test.csv --columns sentence1,sentence2,score
    """
    _quiet()
    from fastsim.training.data import read_data
    from fastsim.training.load import evaluate_model

    dataset, layout = read_data(data, columns=columns, kind=kind)
    found = evaluate_model(
        model, dataset, layout, batch_size=batch_size, max_length=max_length, cpu=cpu, **trust
    )
    if as_json:
        click.echo(json.dumps({"model": model, "data": data, "rows": len(dataset), **found}))
    else:
        click.echo(table({f"{len(dataset)} rows": found}))


@main.command()
@MODEL_OPTION
@click.option("--corpus", required=True, metavar="FILE", help="A text per line, or column text.")
@click.option("--query", required=True, multiple=True, metavar="TEXT", help="May be repeated.")
@click.option("--top-k", type=click.IntRange(1), default=5)
@click.option("--batch-size", type=click.IntRange(1), default=32)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@CPU
@TRUST
@PICKLE
def search(model, corpus, query, top_k, batch_size, as_json, cpu, **trust):
    """Find the texts of a file that are most similar to a query.

    Example: fastsim search --corpus notes.txt --query "how do I reset it" --top-k 5
    """
    _quiet()
    from fastsim.training.data import read_corpus
    from fastsim.training.load import load_encoder, search_texts

    texts = read_corpus(corpus)
    encoder = load_encoder(model, cpu=cpu, **trust)
    answers = search_texts(encoder, list(query), texts, top_k, batch_size=batch_size)
    if as_json:
        click.echo(json.dumps(answers))
        return
    for answer in answers:
        click.echo(answer["query"])
        for hit in answer["hits"]:
            click.echo(f"  {hit['score']:.3f}  {hit['text']}")


@main.command()
@MODEL_OPTION
@click.option("--output", default="fastsim-demo", metavar="DIR", help="The trained model's folder.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--progress/--no-progress", default=True)
@CPU
def demo(model, output, seed, progress, cpu):
    """Train the embedded model on a few sentences that it finds hard, and show what it learnt.

    Takes a minute or two on two cores and no network.

    Example: fastsim demo
    """
    _quiet()
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
    click.echo(f"\n{seconds:.0f} s in all. Model: {output}; pictures: {output}/pictures")


@main.command()
@click.option("--batch-size", type=click.IntRange(1), required=True, help="Over all processes.")
@click.option("--dim", type=click.IntRange(1), help="Of the embeddings; that of --model.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Processes.")
@click.option("--micro-batch-size", type=click.IntRange(1), default=64)
@click.option("--columns", type=click.IntRange(2), default=2, help="Texts a row: 2 and negatives.")
@click.option("--loss", type=click.Choice(list(PRODUCTS)), default="info_nce")
@click.option("--exchange", type=click.Choice(["gather", "ring"]), default="gather")
@click.option("--bits", type=click.Choice(["16", "32"]), default="32", help="Of an embedding.")
@click.option("--tokens", type=click.IntRange(1), default=128, help="Per text.")
@click.option("--gpu", is_flag=True, help="Panels as on a GPU.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="TFLOP/s; measured here.")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="GB/s between ranks.")
@MODEL_OPTION
def plan(model, dim, bits, rate, bandwidth, **options):
    """Show what a step with a large batch takes: memory by part, and the least time.

    Example: fastsim plan --batch-size 65536 --ranks 8 --gpu --bits 16 --rate 400
    """
    _quiet()
    from fastsim.cli import plan as planning

    shape = planning.encoder_shape(model)
    asked = planning.Plan(**options, dim=dim or shape["hidden"], bytes_each=int(bits) // 8, **shape)
    rate = rate * 1e12 if rate else planning.measured_rate("cpu")
    click.echo(planning.report(asked, rate, bandwidth and bandwidth * 1e9))


def _quiet():
    """No chatter of libraries beside our own lines; a missing extra is named."""
    try:
        import datasets
        import transformers
    except ImportError as error:
        text = f"{error.name} is not installed: pip install 'fastsim[train]'"
        raise click.ClickException(text) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
