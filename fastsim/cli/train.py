"""`fastsim train`: its options, from the command line and from a file."""

import json
import os
from pathlib import Path

import click

from fastsim.cli.command import (
    Command,
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
    DATA_HELP,
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
    """Makes the options in a file the defaults of the command line."""
    if value is None:
        return
    path = Path(value)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            config = json.loads(text, object_pairs_hook=_each_once)
        else:
            config = _from_yaml(text)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{value}: cannot be read: {error}") from error
    except Exception as error:  # yaml has errors of its own
        raise click.BadParameter(f"{value}: wanted YAML, got an error: {error}") from error
    if not isinstance(config, dict):
        raise click.BadParameter(
            f"{value}: wanted options with their values, got {type(config).__name__}"
        )
    options = {}
    for option in ctx.command.params:
        for name in option.opts:
            options[name.lstrip("-").replace("-", "_")] = option
    defaults = {}
    for name, setting in config.items():
        option = options.get(str(name).lstrip("-").replace("-", "_"))
        if option is None or option is param:
            raise click.BadParameter(f"{value}: wanted options of fastsim train, got {name!r}")
        if option.name in defaults:
            raise click.BadParameter(f"{value}: wanted each option once, got {name!r} twice")
        if setting is not None and isinstance(setting, bool) != option.is_flag:
            wanted = "true or false" if option.is_flag else "a value other than true or false"
            raise click.BadParameter(f"{value}: {name}: wanted {wanted}, got {setting!r}")
        defaults[option.name] = _as_text(option, setting)
    defaults = {name: setting for name, setting in defaults.items() if setting is not None}
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _from_yaml(text):
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a name that is there twice, of which PyYAML would take the last."""

        def construct_mapping(self, node, deep=False):
            _each_once((str(key.value), None) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def _each_once(pairs):
    """The dictionary of (name, value); ValueError if a name is there twice."""
    result = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"wanted each name once, got {name!r} twice")
        result[name] = value
    return result


def _as_text(option, setting):
    """A value of the file as the command line would give it, with `~` expanded in paths."""
    if option.is_flag or setting is None:
        return setting
    if isinstance(setting, dict):
        as_json = isinstance(option.type, Setting)
        values = [json.dumps(v) if as_json else "" if v is None else v for v in setting.values()]
        setting = [f"{name}={value}" for name, value in zip(setting, values, strict=True)]
    is_path = isinstance(option.type, click.Path)
    texts = [
        os.path.expanduser(str(value)) if is_path else str(value)
        for value in (setting if isinstance(setting, list) else [setting])
    ]
    return texts if option.multiple else ",".join(texts)


@click.command(cls=Command, context_settings={"show_default": True})
@click.option(
    "--config",
    metavar="FILE",
    callback=_config,
    is_eager=True,
    expose_value=False,
    help="YAML or JSON file with options by name. The command line takes precedence.",
)
@MODEL_OPTION
@click.option(
    "--train",
    required=True,
    multiple=True,
    metavar="FILE",
    type=click.Path(),
    help=f"Training data: {DATA_HELP} May be repeated.",
)
@click.option(
    "--eval",
    metavar="FILE",
    type=click.Path(),
    help="Evaluation data, in the formats of --train. The model that scores best on it is kept.",
)
@click.option(
    "--loss",
    required=True,
    metavar="NAME",
    help="Loss to train with. If it does not fit the data, the error lists the losses that do.",
)
@click.option(
    "--output", required=True, metavar="DIR", type=PLACE, help="Folder for the trained model."
)
@click.option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@click.option(
    "--eval-columns", metavar="NAMES", help="Columns of the --eval file. Default: as --columns."
)
@file_format
@click.option("--skip-bad-rows", is_flag=True, help="Skip malformed rows, and report which.")
@click.option("--score-range", type=Range(), help="Map scores from LOW..HIGH to 0..1.")
@click.option(
    "--architecture",
    type=click.Choice(CHOICES["architecture"]),
    default="bi-encoder",
    help="A bi-encoder gives a vector per text, a cross-encoder a score per pair of texts.",
)
@click.option(
    "--pooling",
    type=click.Choice(list(POOLINGS)),
    help="Pooling of the token embeddings. Default: the model's.",
)
@click.option(
    "--dense", type=COUNT, metavar="WIDTH", help="Add a dense layer with this output width."
)
@PROMPT
@click.option(
    "--lora",
    type=COUNT,
    metavar="RANK",
    help="Train LoRA matrices of this rank instead of the weights of the transformer (needs the"
    " package peft).",
)
@click.option(
    "--gradient-checkpointing",
    is_flag=True,
    help="Save memory at the cost of a second forward pass per step.",
)
@click.option(
    "--weights", type=click.Choice(CHOICES["weights"]), default="fp32", help="Dtype of the weights."
)
@click.option("--compile", is_flag=True, help="Compile the transformer with torch.compile.")
@click.option(
    "--matryoshka",
    type=Widths(),
    default=(),
    help="Train prefixes of the embeddings with these widths (Matryoshka). The full width is only"
    " trained if it is listed.",
)
@click.option(
    "--loss-option",
    "loss_options",
    type=Setting(),
    multiple=True,
    callback=by_name,
    help="Option of the loss, such as temperature=0.05. May be repeated.",
)
@click.option(
    "--learn",
    multiple=True,
    metavar="NAME",
    help="Option of the loss to learn: temperature, scale or bias. May be repeated.",
)
@click.option(
    "--loss-learning-rate",
    type=POSITIVE,
    metavar="RATE",
    help="Learning rate of the loss's own parameters. Default: as --learning-rate.",
)
@click.option(
    "--epochs", type=POSITIVE, metavar="NUMBER", default=1.0, help="Passes over the training data."
)
@click.option(
    "--max-steps", type=COUNT, metavar="STEPS", help="Optimizer steps, instead of --epochs."
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
    "--accumulate",
    type=COUNT,
    default=1,
    metavar="BATCHES",
    help="Batches per optimizer step (gradient accumulation).",
)
@click.option(
    "--learning-rate", type=POSITIVE, metavar="RATE", default=5e-5, help="Peak learning rate."
)
@click.option(
    "--warmup",
    type=click.FloatRange(0),
    metavar="STEPS",
    default=0.1,
    help="Steps of warm-up; a value below 1 is a fraction of all steps.",
)
@click.option(
    "--schedule",
    default="linear",
    metavar="NAME",
    help="Learning-rate schedule, by its name in transformers: linear, cosine, constant, ...",
)
@click.option(
    "--weight-decay",
    type=click.FloatRange(0),
    metavar="NUMBER",
    default=0.0,
    help="Weight decay of AdamW.",
)
@MAX_LENGTH
@click.option(
    "--precision",
    type=click.Choice(CHOICES["precision"]),
    default="fp32",
    help="Dtype of the computation: bf16 and fp16 use autocast.",
)
@SEED
@click.option(
    "--eval-steps",
    type=COUNT,
    metavar="STEPS",
    help="Steps between evaluations. Default: as --checkpoint-steps, or once per epoch.",
)
@click.option(
    "--checkpoint-steps",
    type=COUNT,
    metavar="STEPS",
    help="Steps between checkpoints, a multiple of --eval-steps. A new best model is saved too."
    " Default: as --eval-steps, or once per epoch.",
)
@click.option(
    "--checkpoint-minutes",
    type=POSITIVE,
    default=10.0,
    metavar="MINUTES",
    help="Also save a checkpoint after this many minutes of training without one.",
)
@click.option(
    "--checkpoints",
    metavar="DIR",
    type=PLACE,
    help="Folder for checkpoints. Default: OUTPUT-checkpoints, or OUTPUT/checkpoints if nothing can"
    " be written next to OUTPUT.",
)
@click.option(
    "--keep-checkpoints", is_flag=True, help="Keep the checkpoints after the run has finished."
)
@click.option(
    "--logging-steps",
    type=COUNT,
    default=10,
    metavar="STEPS",
    help="Steps between log entries.",
)
@click.option(
    "--best-metric",
    metavar="NAME",
    help="Metric that selects the best model. An unknown name lists the metrics of the data."
    " Default: by the columns and the model's similarity, such as spearman_cosine for scores.",
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
    help="Where to report metrics: none, all, or names such as tensorboard,wandb.",
)
@click.option("--resume", is_flag=True, help="Continue from the last complete checkpoint.")
@click.option(
    "--overwrite", is_flag=True, help="Start again, and remove the checkpoints of an earlier run."
)
@click.option(
    "--dry-run", is_flag=True, help="Check options and data, show what would be done, and exit."
)
@click.option(
    "--push-to-hub",
    metavar="NAME",
    help="Upload the trained model to the Hugging Face hub under this name, such as owner/model.",
)
@click.option(
    "--progress/--no-progress", default=True, help="Print a line every --logging-steps steps."
)
@click.option("--verbose", is_flag=True, help="Add the gradient norm and the epoch to each line.")
@CPU
@TRUST
@PICKLE
def train(dry_run, **options):
    """Train an encoder on texts in files.

    The columns of the data determine which losses can be trained:

    \b
    sentence1, sentence2, score
        cosent, angle, cosine_regression
    anchor, positive[, negative, ...]
        info_nce, decoupled_contrastive, full_triplet, siglip, triplet_margin
    sentence1, sentence2, label
        classification
    text, label
        siglip, matrix_mse, matrix_cross_entropy, cosent_matrix, sup_con,
        nt_xent, multi_similarity, circle, batch_hard_triplet
    sentence1, sentence2, score or label, with --architecture cross-encoder
        cosent, cross_entropy, regression

    Rows with equal values in a column `together` are put into one batch.

    Example: fastsim train --train train.csv --eval dev.csv --loss cosent --output model
    --columns sentence1,sentence2,score
    """
    quiet()
    from accelerate import PartialState

    from fastsim.training.model_card import main_metrics
    from fastsim.training.options import Options
    from fastsim.training.run import train as run

    paths = options["train"]
    options["train"] = paths[0] if len(paths) == 1 else list(paths)
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
