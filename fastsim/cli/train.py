"""`fastsim train`: its options, from the command line and from a file."""

import json
import os
from pathlib import Path

import click

from fastsim.cli.command import (
    Command,
    Prompt,
    Range,
    Setting,
    Widths,
    by_name,
    quiet,
    table,
)
from fastsim.cli.options import (
    COLUMNS_HELP,
    CPU,
    FORMATS_HELP,
    MAX_LENGTH,
    MODEL_OPTION,
    PICKLE,
    PLACE,
    PROMPT,
    SEED,
    TRUST,
    file_format,
)
from fastsim.encoders.names import POOLINGS
from fastsim.training.counted import counted
from fastsim.training.options import CHOICES

POSITIVE = click.FloatRange(0, min_open=True)
COUNT = click.IntRange(1)


def _config(ctx, param, value):
    """The options of a file become the defaults of the command line."""
    if value is None:
        return
    path = Path(value)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            found = json.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {value}: {error}") from error
    except Exception as error:  # yaml has errors of its own
        raise click.BadParameter(f"{value} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value}: wanted names of options with their values")
    known = {}
    for option in ctx.command.params:
        for name in option.opts:
            known[name.lstrip("-").replace("-", "_")] = option
    defaults = {}
    for name, given in found.items():
        option = known.get(str(name).lstrip("-").replace("-", "_"))
        if option is None or option is param:
            raise click.BadParameter(f"{value}: no option {name!r}")
        if isinstance(given, bool) != (option.is_flag and given is not None):
            wanted = "true or false" if option.is_flag else "a value, not true or false"
            raise click.BadParameter(f"{value}: {name}: wanted {wanted}, got {given!r}")
        defaults[option.name] = _as_text(option, given)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_text(option, given):
    """A value of the file as the command line would give it, `~` as a shell would."""
    if isinstance(option.type, (Setting, Prompt)) and isinstance(given, dict):
        return [
            f"{name}={value if isinstance(option.type, Prompt) else json.dumps(value)}"
            for name, value in given.items()
        ]
    if option.is_flag or given is None:
        return given
    places = isinstance(option.type, click.Path)
    texts = [
        os.path.expanduser(str(value)) if places else str(value)
        for value in (given if isinstance(given, list) else [given])
    ]
    return texts if option.multiple else ",".join(texts)


@click.command(cls=Command, context_settings={"show_default": True})
@click.option(
    "--config",
    metavar="FILE",
    callback=_config,
    is_eager=True,
    expose_value=False,
    help="YAML or JSON file of options by name; the command line overrides it.",
)
@MODEL_OPTION
@click.option(
    "--train",
    required=True,
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help=f"{FORMATS_HELP} May be repeated.",
)
@click.option(
    "--eval",
    metavar="FILE",
    type=click.Path(),
    help="Evaluation data, in the same formats as --train. The model that is best on them is kept.",
)
@click.option(
    "--loss",
    required=True,
    metavar="NAME",
    help="Loss to train with; one that does not fit the data is refused with a list of those"
    " that do.",
)
@click.option(
    "--output", required=True, metavar="DIR", type=PLACE, help="Folder for the trained model."
)
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@click.option("--eval-columns", metavar="NAMES", help="The same for --eval. Default: as --columns.")
@file_format
@click.option(
    "--skip-bad-rows", is_flag=True, help="Leave out rows that do not fit, and say which."
)
@click.option("--score-range", type=Range(), help="Map scores from LOW..HIGH to 0..1.")
@click.option(
    "--architecture",
    type=click.Choice(CHOICES["architecture"]),
    default="bi-encoder",
    help="A vector per text, or a score per pair of texts.",
)
@click.option(
    "--pooling",
    type=click.Choice(list(POOLINGS)),
    help="Pooling of token embeddings. Default: the model's.",
)
@click.option("--dense", type=COUNT, metavar="WIDTH", help="Add a dense layer of this width.")
@PROMPT
@click.option(
    "--lora",
    type=COUNT,
    metavar="RANK",
    help="Train LoRA matrices of this rank in place of the transformer's weights (needs peft).",
)
@click.option(
    "--gradient-checkpointing",
    is_flag=True,
    help="Less memory, at the cost of one more forward pass per step.",
)
@click.option(
    "--weights", type=click.Choice(CHOICES["weights"]), default="fp32", help="Dtype of the weights."
)
@click.option("--compile", is_flag=True, help="Compile the transformer with torch.compile.")
@click.option(
    "--matryoshka",
    type=Widths(),
    default=(),
    help="Train prefixes of these widths; the whole embedding only if its width is listed.",
)
@click.option(
    "--loss-option",
    "loss_options",
    type=Setting(),
    multiple=True,
    callback=by_name,
    help="An option of the loss, such as temperature=0.05. May be repeated.",
)
@click.option(
    "--learn",
    multiple=True,
    metavar="NAME",
    help="A loss option to learn: temperature, scale or bias. May be repeated.",
)
@click.option(
    "--loss-learning-rate",
    type=POSITIVE,
    help="Learning rate of the loss's own parameters. Default: as --learning-rate.",
)
@click.option("--epochs", type=POSITIVE, default=1.0, help="Passes over the data.")
@click.option(
    "--max-steps", type=COUNT, metavar="STEPS", help="Optimizer steps, in place of --epochs."
)
@click.option(
    "--batch-size",
    type=COUNT,
    default=32,
    metavar="ROWS",
    help="Rows per batch, over all processes together.",
)
@click.option(
    "--micro-batch-size",
    type=COUNT,
    metavar="TEXTS",
    help="Encode at most this many texts at a time (GradCache). Default: the whole batch.",
)
@click.option(
    "--accumulate", type=COUNT, default=1, metavar="BATCHES", help="Batches per optimizer step."
)
@click.option("--learning-rate", type=POSITIVE, default=5e-5, help="Peak learning rate.")
@click.option(
    "--warmup",
    type=click.FloatRange(0),
    default=0.1,
    help="Warm-up steps: their number, or below 1 their share of all steps.",
)
@click.option(
    "--schedule",
    default="linear",
    metavar="NAME",
    help="Learning-rate schedule, as transformers names it: linear, cosine, constant, ...",
)
@click.option(
    "--weight-decay", type=click.FloatRange(0), default=0.0, help="Weight decay of AdamW."
)
@MAX_LENGTH
@click.option(
    "--precision",
    type=click.Choice(CHOICES["precision"]),
    default="fp32",
    help="Dtype of the computation (autocast).",
)
@SEED
@click.option(
    "--eval-steps",
    type=COUNT,
    metavar="STEPS",
    help="Steps between evaluations. Default: as --checkpoint-steps, else once per epoch.",
)
@click.option(
    "--checkpoint-steps",
    type=COUNT,
    metavar="STEPS",
    help="Steps between checkpoints, a multiple of --eval-steps; each new best model of --eval is"
    " saved too. Default: as --eval-steps, else once per epoch.",
)
@click.option(
    "--checkpoint-minutes",
    type=POSITIVE,
    default=10.0,
    metavar="MINUTES",
    help="Also save whenever this many minutes of training have passed.",
)
@click.option(
    "--checkpoints",
    metavar="DIR",
    type=PLACE,
    help="Folder for checkpoints. Default: OUTPUT-checkpoints beside the output, or a folder inside"
    " the output where nothing can be written beside it.",
)
@click.option("--keep-checkpoints", is_flag=True, help="Keep the checkpoints of a finished run.")
@click.option(
    "--logging-steps",
    type=COUNT,
    default=10,
    metavar="STEPS",
    help="Steps between lines of the log.",
)
@click.option(
    "--best-metric",
    metavar="NAME",
    help="Metric that chooses the best model; a wrong name lists those of the data. Default: by the"
    " columns, such as spearman_cosine for scores.",
)
@click.option(
    "--early-stopping",
    type=COUNT,
    metavar="TIMES",
    help="Stop after this many evaluations without a better model. Default: never.",
)
@click.option(
    "--report-to",
    default="none",
    metavar="NAMES",
    help="Where metrics are reported: tensorboard, wandb, ..., several with commas, or all.",
)
@click.option("--resume", is_flag=True, help="Continue from the last complete checkpoint.")
@click.option(
    "--overwrite", is_flag=True, help="Start afresh and remove an earlier run's checkpoints."
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be done, and end.")
@click.option(
    "--push-to-hub",
    metavar="NAME",
    help="Upload the trained model to the hub under this name, such as owner/model.",
)
@click.option(
    "--progress/--no-progress", default=True, help="Print a line every --logging-steps steps."
)
@click.option("--verbose", is_flag=True, help="Add gradient norm and epoch to each line.")
@CPU
@TRUST
@PICKLE
def train(dry_run, **options):
    """Train an encoder on texts in files.

    The columns decide the losses: (sentence1, sentence2, score) cosent, angle, cosine_regression;
    (anchor, positive[, negative, ...]) info_nce, decoupled_contrastive, full_triplet, siglip,
    triplet_margin; (sentence1, sentence2, label) classification; (text, label) siglip, matrix_mse,
    matrix_cross_entropy, cosent_matrix, sup_con, nt_xent, multi_similarity, circle,
    batch_hard_triplet. A cross-encoder takes pairs: cosent, cross_entropy, regression. Rows with
    equal values in a column `together` are put into one batch.

    Example: fastsim train --train train.csv --eval dev.csv --loss cosent --output model
    --columns sentence1,sentence2,score
    """
    quiet()
    from accelerate import PartialState

    from fastsim.training.model_card import main_metrics
    from fastsim.training.options import Options
    from fastsim.training.run import train as run

    files = options["train"]
    options["train"] = files[0] if len(files) == 1 else list(files)
    result = run(Options(**options), dry_run=dry_run)
    if dry_run or not PartialState().is_main_process:
        return
    if result["after"]:
        names = main_metrics(result["after"], result["metric"])
        click.echo(
            table({when: {n: result[when][n] for n in names} for when in ("before", "after")})
        )
    click.echo(
        f"{counted(result['steps'], 'step')} in {result['seconds']:.0f} s:"
        f" {click.format_filename(options['output'])}"
    )
