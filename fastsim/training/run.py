"""One training run: from a data file and a model to a better model in a folder."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from fastsim.encoders.encoder import EMBEDDED
from fastsim.training import data
from fastsim.training.folders import replaced_folder
from fastsim.training.prepare import prepare

CHECKPOINTS = "checkpoints"
# Options that may change between a run and its resumption.
_FREE = ("resume", "overwrite", "output", "progress", "report_to", "trust_remote_code")


class OutputError(OSError):
    """An output folder that cannot be used; the message says why, in one line."""


@dataclass
class Options:
    """What `fastsim train` can be told; the command line's help explains each."""

    train: str
    output: str
    loss: str
    model: str = EMBEDDED
    eval: str | None = None
    columns: str | None = None
    eval_columns: str | None = None
    kind: str | None = None
    score_range: tuple | None = None
    architecture: str = "bi-encoder"
    pooling: str | None = None
    dense: int | None = None
    loss_options: dict | None = None
    learn: tuple = ()
    loss_learning_rate: float | None = None
    epochs: float = 1.0
    max_steps: int = -1
    batch_size: int = 32
    micro_batch_size: int | None = None
    duplicates: str = "apart"
    accumulate: int = 1
    learning_rate: float = 5e-5
    warmup: float = 0.1
    schedule: str = "linear"
    weight_decay: float = 0.0
    max_length: int | None = None
    precision: str = "fp32"
    seed: int = 0
    eval_steps: int | None = None
    checkpoint_steps: int | None = None
    logging_steps: int = 10
    best_metric: str | None = None
    early_stopping: int | None = None
    report_to: str = "none"
    cpu: bool = False
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    trust_remote_code: bool = False
    allow_pickle: bool = False


def train(options):
    """Run `Options`; the model, `fastsim_training.json` and `pictures/` end in `options.output`.

    Returns what `fastsim_training.json` holds: options, versions, metrics before and after, the
    history of losses and metrics, seconds of training. The folder is complete or as it was before,
    but for `checkpoints/`. ValueError (`DataError`, `ModelError` among them) for what does not fit,
    `OutputError` for the folder.
    """
    import torch
    import transformers
    from accelerate import PartialState

    from fastsim.training.trainer import Collator, Trainer, freeze_idle

    output = Path(os.path.abspath(options.output))
    checkpoints = output / CHECKPOINTS
    process = PartialState(cpu=options.cpu)
    several = process.num_processes > 1
    task = prepare(options, group=torch.distributed.group.WORLD if several else None)
    _check_output(output, options)
    with process.main_process_first():
        state, checkpoint = _begin(options, task, checkpoints, process.is_main_process)
    collator = Collator(
        task.encoder,
        task.layout,
        cross=task.cross,
        micro_batch_size=options.micro_batch_size,
        exclude=options.duplicates == "exclude",
    )
    if several:
        freeze_idle(task.encoder, task.features())
    transformers.set_seed(options.seed)
    callbacks = []
    if options.early_stopping:
        callbacks.append(transformers.EarlyStoppingCallback(options.early_stopping))
    trainer = Trainer(
        model=task.model,
        args=_arguments(options, task, checkpoints, process.num_processes),
        data_collator=collator,
        train_dataset=task.train,
        eval_dataset=task.eval,
        layout=task.layout,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        evaluation=None if task.eval is None else task.evaluate,
        loss_learning_rate=options.loss_learning_rate,
        callbacks=callbacks,
    )
    outcome = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    after = None if task.eval is None else task.evaluate()
    result = {
        "options": asdict(options),
        "versions": versions(),
        "columns": task.layout.columns,
        "rows": len(task.train),
        "steps": outcome.global_step,
        "seconds": outcome.metrics["train_runtime"],
        "metric": task.metric,
        "before": state["before"],
        "after": after,
        "loss_values": task.loss_values(),
        "history": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        _save(task, result, state, output)
    return result


# ---- the folder ----


def _check_output(output, options):
    """Refuse an output that cannot be written before hours are spent on it."""
    if output.exists() and not output.is_dir():
        raise OutputError(f"output: wanted a folder, {options.output!r} is a file")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for folder in (output, output.parent):  # the new model is written beside the old
            with tempfile.TemporaryDirectory(prefix=".fastsim-", dir=folder):
                pass
    except OSError as error:
        raise OutputError(f"output: {options.output!r}: {error.strerror}") from error


def _begin(options, task, checkpoints, main):
    """(what is known of the untrained model, the checkpoint to go on from or None).

    main: whether this is the process that writes; the others read what it wrote.
    """
    from fastsim.training.trainer import last_checkpoint

    file = checkpoints / "run.json"
    asked = {key: value for key, value in asdict(options).items() if key not in _FREE}
    asked = json.loads(json.dumps(asked)) | {"data": data.fingerprint(options.train)}
    if options.resume:
        checkpoint = last_checkpoint(checkpoints)
        if checkpoint is None or not file.is_file():
            raise OutputError(f"resume: no complete checkpoint in {str(checkpoints)!r}")
        state = json.loads(file.read_text(encoding="utf-8"))
        changed = [key for key, value in asked.items() if state["asked"].get(key) != value]
        if changed:
            was, now = state["asked"].get(changed[0]), asked[changed[0]]
            raise ValueError(f"resume: {changed[0]} was {was!r} in this run, now {now!r}")
        for path in checkpoints.glob("checkpoint-*") if main else ():
            if not (path / "trainer_state.json").is_file():
                shutil.rmtree(path)  # its writing was cut off
        return state, checkpoint
    if not main:
        return json.loads(file.read_text(encoding="utf-8")), None
    if checkpoints.exists():
        if not options.overwrite:
            raise OutputError(
                f"output: {options.output!r} holds checkpoints of an earlier run;"
                " --resume goes on with it, --overwrite begins anew"
            )
        shutil.rmtree(checkpoints)
    before = None if task.eval is None else task.evaluate()
    if before is not None and task.metric not in before:
        raise ValueError(f"best_metric: wanted one of {', '.join(before)}, got {task.metric!r}")
    state = {"asked": asked, "before": before, **task.sample()}
    checkpoints.mkdir()
    file.write_text(json.dumps(state), encoding="utf-8")
    return state, None


def _save(task, result, state, output):
    from fastsim.training import plots

    with replaced_folder(output) as folder:
        task.write_to(folder)
        text = json.dumps(result, indent=1)
        (folder / "fastsim_training.json").write_text(text, encoding="utf-8")
        pictures = folder / "pictures"
        plots.curves(result["history"], task.metric, pictures / "curves.png")
        now = task.sample()
        if "heat" in now:
            plots.heat_maps(state["heat"], now["heat"], pictures / "cosines.png")
        if "scores" in now:
            plots.similarity(
                now["gold"], state["scores"], now["scores"], pictures / "similarity.png"
            )


def _arguments(options, task, checkpoints, processes):
    import torch
    import transformers

    steps = {"eval": options.eval_steps, "save": options.checkpoint_steps}
    evaluates = task.eval is not None
    if evaluates and options.eval_steps and not options.checkpoint_steps:
        steps["save"] = options.eval_steps  # the best model is among the saved
    if evaluates and options.checkpoint_steps and not options.eval_steps:
        steps["eval"] = options.checkpoint_steps
    return transformers.TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=max(1, options.batch_size // processes),
        ddp_find_unused_parameters=False,  # there are none: `freeze_idle`
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup,
        lr_scheduler_type=options.schedule,
        weight_decay=options.weight_decay,
        gradient_accumulation_steps=options.accumulate,
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        seed=options.seed,
        data_seed=options.seed,
        logging_steps=options.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would hide a loss that is NaN
        eval_strategy=("steps" if steps["eval"] else "epoch") if evaluates else "no",
        eval_steps=steps["eval"],
        save_strategy="steps" if steps["save"] else "epoch",
        save_steps=steps["save"] or 500,
        save_total_limit=2,
        load_best_model_at_end=evaluates,
        metric_for_best_model=task.metric if evaluates else None,
        greater_is_better=True if evaluates else None,
        report_to=options.report_to.split(","),
        remove_unused_columns=False,
        use_cpu=options.cpu,
        dataloader_pin_memory=torch.cuda.is_available() and not options.cpu,
        disable_tqdm=not options.progress,
    )


def versions():
    """Versions of what a result depends on."""
    import platform
    from importlib.metadata import version

    import fastsim

    names = ("torch", "transformers", "accelerate", "datasets")
    found = {name: version(name) for name in names}
    return {"fastsim": fastsim.__version__, "python": platform.python_version(), **found}
