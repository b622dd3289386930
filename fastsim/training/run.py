"""A training run: from data and a model to a trained model in a folder."""

import json
import os
import signal
from pathlib import Path

from fastsim.environment import variables
from fastsim.files import OutputError
from fastsim.folders import check_writable, finish_exchanges, replaced_folder
from fastsim.manifest import files_of
from fastsim.tell import tell
from fastsim.training import beginning
from fastsim.training import checkpoints as saved
from fastsim.training.batch_plan import small_batches
from fastsim.training.collator import Collator
from fastsim.training.model_card import model_card
from fastsim.training.models import freeze_idle
from fastsim.training.options import Options
from fastsim.training.prepare import prepare
from fastsim.training.required import check_packages
from fastsim.training.schedule import check_rates

__all__ = ["Options", "OutputError", "train"]


def train(options, say=None, *, dry_run=False):
    """Train, and write the model, `fastsim_training.json` and `pictures/` to `options.output`.

    The output folder is either complete or as it was before. During the run there are checkpoints
    next to it, or inside it if nothing can be written next to it.

    Args:
        options: `Options`.
        say: a function of one line of text, for progress; None: lines go to the error stream.
        dry_run: check everything, report what would be done, and return None.

    Returns:
        The content of `fastsim_training.json`: options, versions, metrics before and after
        training, the history of losses and metrics, seconds of training.

    Raises:
        ValueError: for options, data or a model that do not fit (`DataError`, `ModelError`).
        TypeError: for an option of the wrong type, or one that JSON cannot hold.
        OutputError: for a folder that cannot be written.
        FloatingPointError: for a loss or a model that became NaN or infinite.
        Stopped: after a signal, once a checkpoint is written.
        ImportError: for a package that is missing or too old.
    """
    check_packages()
    import torch
    from accelerate import PartialState

    options.as_written()  # so that an error is raised here, and not after the training
    output = Path(os.path.realpath(options.output))
    _check_utf8("output", output)
    process = PartialState(cpu=options.cpu or not torch.cuda.is_available())
    several = process.num_processes > 1
    say = (say or tell) if process.is_main_process else (lambda line: None)
    checkpoints = _checkpoint_folder(options, output, process)
    task = _prepared(options, torch.distributed.group.WORLD if several else None, process, say)
    arguments = _arguments(options, task, checkpoints, process.num_processes)
    _check_arguments(options, task, arguments, say)
    if dry_run:
        if process.is_main_process:
            beginning.check(options, checkpoints, process.num_processes)
        return None
    if not process.is_main_process:
        return _train_and_save(options, task, arguments, output, checkpoints, process, say)
    with saved.claimed(checkpoints, output):
        finish_exchanges(output, say)
        return _train_and_save(options, task, arguments, output, checkpoints, process, say)


def _prepared(options, group, process, say):
    """The `Task` of the options; says what it reads and what the run will do."""
    from fastsim.training import sharding
    from fastsim.training.report_lines import header

    say(f"reading {options.train if isinstance(options.train, str) else ', '.join(options.train)}")
    with variables(sharding.loading_variables()):
        task = prepare(options, group, say)
    for line in header(options, task, process.num_processes):
        say(line)
    note = small_batches(task.batches, options.loss)
    if note:
        say(note)
    return task


def _check_arguments(options, task, arguments, say):
    """Refuse what transformers or the hub would refuse only during the training or after it.

    Says so if the warm-up is longer than the training.
    """
    from fastsim.training.report_lines import planned_steps

    steps, *_ = planned_steps(options, task)
    warmup = arguments.get_warmup_steps(steps)
    note = check_rates(options.schedule, options.learning_rate, warmup, steps)
    if note:
        say(note)
    _check_reporting(arguments)
    _check_hub(options.push_to_hub)


def _checkpoint_folder(options, output, process):
    """The folder of the checkpoints, the same in all processes; OutputError if it cannot be used.

    The first process alone chooses it, as the choice depends on which folders exist.
    """
    from accelerate.utils import broadcast_object_list

    folder = None
    if process.is_main_process:
        check_writable(output)
        folder = saved.checkpoint_folder(output, options.checkpoints)
        if options.resume:  # otherwise they may belong to another run, which `claimed` checks
            beginning.check_options(options, folder, process.num_processes)
    (folder,) = broadcast_object_list([folder])
    _check_utf8("checkpoints", folder)
    return folder


def _train_and_save(options, task, arguments, output, checkpoints, process, say):
    """`train` after all checks: trains from the start or from a checkpoint, and saves the model."""
    state, checkpoint = beginning.where_to_begin(options, task, checkpoints, process, say)
    if state["before"]:
        say(f"before   {task.metric} {state['before'][task.metric]:.4f}")
    trainer, watch = _make_trainer(options, task, arguments, output, process, say)
    with watch.listening():
        outcome = trainer.resume(checkpoint, say)
    if watch.signal and outcome.global_step < trainer.state.max_steps:
        _stop(watch.signal, outcome.global_step, trainer.state.max_steps, checkpoints)
    trainer.check_finite()
    whole_task = trainer.whole_task()
    result = _training_result(options, task, whole_task, trainer, outcome, state["before"])
    if trainer.is_world_process_zero():
        _save(whole_task, result, state, output, say, cross=task.cross)
        if not options.keep_checkpoints:
            saved.remove_run(checkpoints)
        if options.push_to_hub:
            _push(options.push_to_hub, output, say)
    return result


def _make_trainer(options, task, arguments, output, process, say):
    """(a `Trainer` of the task, the `Watch` that ends its training after a signal)."""
    import transformers

    from fastsim.training import sharding
    from fastsim.training.stopping import Watch
    from fastsim.training.trainer import Trainer

    several = process.num_processes > 1
    collator = Collator(
        task.encoder, task.layout, cross=task.cross, micro_batch_size=options.micro_batch_size
    )
    if several:
        freeze_idle(task.encoder, task.features())
    transformers.set_seed(options.seed)
    watch = Watch(options.checkpoint_minutes, several=several)
    with _tensorboard_in(output / "runs"):
        trainer = Trainer(
            model=task.model,
            args=arguments,
            data_collator=collator,
            train_dataset=task.train,
            eval_dataset=task.eval,
            batches=task.batches,
            batch_size=options.batch_size,
            micro_batch_size=options.micro_batch_size,
            task=task,
            loss_learning_rate=options.loss_learning_rate,
            callbacks=[watch, *_callbacks(options, task, say)],
        )
    if sharding.configured() and not trainer.is_sharded:
        say(f"accelerate does not shard on {process.device}: every process holds all weights")
    # Their output would mix with the lines of the run.
    for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        trainer.remove_callback(callback)
    return trainer, watch


def _callbacks(options, task, say):
    """The callbacks of the training that the options ask for."""
    import transformers

    from fastsim.training.report_lines import Lines

    callbacks = []
    if options.progress:
        lines = Lines(say, len(task.train), task.metric, verbose=options.verbose)
        callbacks.append(lines)
    if options.early_stopping:
        callbacks.append(transformers.EarlyStoppingCallback(options.early_stopping))
    return callbacks


def _training_result(options, task, whole_task, trainer, outcome, before):
    """The content of `fastsim_training.json`.

    whole_task: the task with the trained, unsharded model; all processes evaluate it together.
    outcome: the result of the trainer. before: the metrics before the training, or None.
    """
    after = None if trainer.eval_dataset is None else whole_task.evaluate()
    return {
        "options": options.as_written(),
        "versions": versions(),
        "columns": task.layout.columns,
        "rows": len(trainer.train_dataset),
        "steps": outcome.global_step,
        "seconds": outcome.metrics["train_runtime"],
        "metric": task.metric,
        "before": before,
        "after": after,
        "loss_values": whole_task.loss_values(),
        "history": trainer.state.log_history,
    }


def _tensorboard_in(folder):
    """A context in which a new Trainer logs to TensorBoard in `folder`.

    TENSORBOARD_LOGGING_DIR overrides the folder. transformers reads that variable when the Trainer
    is created.
    """
    name = "TENSORBOARD_LOGGING_DIR"
    return variables({name: os.environ.get(name, str(folder))})


def _push(name, output, say):
    """Upload the files of the manifest, and no other files in the folder."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    hub.create_repo(name, exist_ok=True)
    hub.upload_folder(repo_id=name, folder_path=output, allow_patterns=list(files_of(output)))
    say(f"pushed to {name}")


def _stop(number, step, steps, checkpoints):
    from fastsim.training.stopping import Stopped

    raise Stopped(
        f"{signal.Signals(number).name} ended the run after step {step} of {steps}; its checkpoint"
        f" is in {str(checkpoints)!r}. Continue with the same command and --resume",
        number,
    )


def _save(task, result, state, output, say, *, cross):
    with replaced_folder(output, say) as folder:
        task.write_to(folder)
        text = json.dumps(result, indent=1)
        (folder / "fastsim_training.json").write_text(text, encoding="utf-8")
        card = model_card(result, task.encoder, output.name, cross=cross)
        # File names may contain bytes that are not UTF-8.
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")
        _draw(task, result, state, folder / "pictures", say)


def _draw(task, result, state, folder, say):
    """Draw the pictures of a run; an error is only reported, since the model is complete."""
    try:
        from fastsim.training import plots

        plots.draw(result["history"], result["metric"], state, task.sample(), folder)
    except Exception as error:
        say(f"pictures: not all were drawn: {type(error).__name__}: {error}")


def _arguments(options, task, checkpoints, processes):
    """The `TrainingArguments` of transformers. processes: their number."""
    import torch
    import transformers

    steps = {"eval": options.eval_steps, "save": options.checkpoint_steps}
    evaluates = task.eval is not None
    if evaluates and options.eval_steps and not options.checkpoint_steps:
        steps["save"] = options.eval_steps  # so that the best model is saved
    if evaluates and options.checkpoint_steps and not options.eval_steps:
        steps["eval"] = options.checkpoint_steps
    arguments = transformers.TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=max(1, options.batch_size // processes),
        ddp_find_unused_parameters=False,  # `freeze_idle` leaves none
        num_train_epochs=options.epochs,
        max_steps=options.max_steps or -1,
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
        logging_nan_inf_filter=False,  # would hide a NaN loss
        eval_strategy=("steps" if steps["eval"] else "epoch") if evaluates else "no",
        eval_steps=steps["eval"],
        save_strategy="steps" if steps["save"] else "epoch",
        save_steps=steps["save"] or 500,
        save_total_limit=None,  # `remove_older` keeps folders that are not ours
        load_best_model_at_end=evaluates,
        metric_for_best_model=task.metric if evaluates else None,
        greater_is_better=True if evaluates else None,
        report_to=options.report_to.split(","),
        remove_unused_columns=False,
        use_cpu=options.cpu or not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available() and not options.cpu,
        disable_tqdm=True,
    )
    if arguments.n_gpu > 1:
        # transformers would split each batch over the GPUs, and with it the negatives.
        arguments._n_gpu = 1
    return arguments


def _check_utf8(name, folder):
    """Refuse a path that safetensors and tokenizers cannot handle."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise OutputError(f"{name}: wanted a path in UTF-8, got {str(folder)!r}") from None


def _check_reporting(arguments):
    """Refuse a reporter that is unknown or not installed, before anything is written."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for make in get_reporting_integration_callbacks(arguments.report_to):
            make()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"report_to: {error}") from error


def _check_hub(name):
    """Refuse an invalid name early, which the hub would refuse only after the training."""
    from huggingface_hub.utils import validate_repo_id

    try:
        if name is not None:
            validate_repo_id(name)
    except ValueError as error:
        raise ValueError(f"push_to_hub: {error}") from error


def versions():
    """The versions of the packages that a result depends on."""
    import platform
    from importlib.metadata import version

    import fastsim

    names = ("torch", "transformers", "accelerate", "datasets")
    packages = {name: version(name) for name in names}
    return {"fastsim": fastsim.__version__, "python": platform.python_version(), **packages}
