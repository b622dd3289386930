"""The lines that a run prints: a header before the first step, then one every `logging_steps`."""

import time

import torch
import transformers

from fastsim.training.counted import counted
from fastsim.training.prompts import unsearched_prompts

_SAMPLED = 1000  # rows whose texts the header describes


def header(options, task, processes):
    """Lines that describe the model, the data and the training."""
    idle = idle_gpus(task.encoder.device, processes)
    unsearched = None if task.cross else unsearched_prompts(task.encoder)
    return [
        f"device   {_device(task.encoder.device)}, {options.precision},"
        f" {counted(processes, 'process', 'processes')}",
        *([idle] if idle else []),
        f"model    {options.model}: {_model(task)}",
        f"data     {counted(len(task.train), 'row')}, {task.layout.name}"
        f" ({', '.join(task.layout.columns)}); {_text_lengths(task)}",
        f"batches  {_batches(options, task)}",
        f"loss     {options.loss}{_loss_values(task)}, backend {_backend(task.encoder.device)}",
        *([f"prompts  {unsearched}"] if unsearched else []),
    ]


def _device(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return f"CPU{threads}"


def _model(task):
    parameters = sum(p.numel() for p in task.model.parameters())
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    text = f"{parameters / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained"
    if task.cross:
        return text
    return f"{text}, width {task.encoder.dim}, {task.encoder.pooling} pooling"


def _text_lengths(task):
    rows = task.train.select(range(min(_SAMPLED, len(task.train))))
    lengths = sorted(len(text) for name in task.layout.texts for text in rows[name])
    sampled = f" in the first {len(rows):,} rows" if len(rows) < len(task.train) else ""
    return (
        f"texts of {lengths[len(lengths) // 2]} characters (median), {lengths[-1]} at most{sampled}"
    )


def _batches(options, task):
    steps, count, size = planned_steps(options, task)
    text = f"{count:,} of {counted(size, 'row')}"
    if options.accumulate > 1:
        text += f", {options.accumulate} accumulated per step"
    if options.micro_batch_size:
        text += f", {counted(options.micro_batch_size, 'text')} encoded at a time"
    return f"{text}; {counted(steps, 'step')}"


def _loss_values(task):
    values = ", ".join(f"{name}={_shown(value)}" for name, value in task.loss_values().items())
    return f" ({values})" if values else ""


def idle_gpus(device, processes):
    """A note if a single process trains on one of several GPUs, or None."""
    count = torch.cuda.device_count() if device.type == "cuda" and processes == 1 else 1
    if count < 2:
        return None
    start = f"torchrun --nproc-per-node {count} -m fastsim train"
    return f"{count} GPUs are available, one is used; to use all: {start}"


def _shown(value):
    """A number with the digits of float32."""
    return f"{value:.6g}" if isinstance(value, float) else value


def planned_steps(options, task):
    """(steps of the run, batches of an epoch, rows of a full batch)."""
    rows = len(task.train)
    size = min(options.batch_size, rows)
    count = -(-rows // options.batch_size) if task.batches is None else len(task.batches)
    updates = max(-(-count // options.accumulate), 1)
    return options.max_steps or -int(-options.epochs * updates // 1), count, size


def _backend(device):
    from fastsim.backends import pick

    return pick(None, torch.empty(1, device=device)).name


class Lines(transformers.TrainerCallback):
    """Prints a line every `logging_steps`.

    It has the step, the loss, the learning rate, the speed, the remaining time, and the share of
    rows whose positive scored above the negatives of the batch. rows: of an epoch. The speed
    assumes that all batches of an epoch are equal, although some are smaller.
    """

    def __init__(self, say, rows, metric=None, *, verbose=False):
        self.say, self.rows, self.metric, self.verbose = say, rows, metric, verbose
        self._start = None

    def on_train_begin(self, args, state, control, **more):
        self._start = (time.monotonic(), state.global_step, state.epoch)

    def on_log(self, args, state, control, logs=None, **more):
        if logs and f"eval_{self.metric}" in logs:
            self.say(f"step {state.global_step:,}  {self.metric} {logs[f'eval_{self.metric}']:.4f}")
        if not logs or "loss" not in logs or state.global_step == self._start[1]:
            return
        done = state.global_step - self._start[1]
        seconds = time.monotonic() - self._start[0]
        remaining = seconds / done * (state.max_steps - state.global_step)
        speed = (state.epoch - self._start[2]) * self.rows / seconds
        line = (
            f"step {state.global_step:,}/{state.max_steps:,}  loss {logs['loss']:.4f}"
            f"  learning rate {logs['learning_rate']:.2e}  {_rounded(speed)} rows/s"
            f"  {_duration(remaining)} left"
        )
        if "batch_accuracy" in logs:
            line += f"  in-batch accuracy {logs['batch_accuracy']:.3f}"
        if self.verbose:
            line += f"  gradient norm {logs.get('grad_norm', 0.0):.3g}  epoch {state.epoch:.3f}"
        self.say(line)


def _rounded(speed):
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def _duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
