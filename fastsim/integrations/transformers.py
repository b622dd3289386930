"""Logs the metrics of training batches (`fastsim.metrics`) in transformers' trainers.

from fastsim.integrations.transformers import log_metrics

trainer = SentenceTransformerTrainer(model=model, loss=loss, ...)
log_metrics(trainer)
trainer.train()
"""

import functools

import torch
import transformers

from fastsim.backends import pick
from fastsim.batch_metrics import Metrics, metrics


def log_metrics(trainer: transformers.Trainer, prefix: str = "batch_") -> Metrics:
    """Makes a trainer log `fastsim.metrics` of its training batches wherever it logs the loss.

    trainer: a transformers.Trainer or a subclass, such as sentence-transformers'. prefix: put
    before the names of `Metrics.read`, in the log and in every reporter (TensorBoard, W&B).

    Each value covers the steps since the last log. Nothing is logged for losses that
    `fastsim.metrics` does not observe, such as those of other packages, nor if the trainer compiles
    its model, nor if the backend of the losses observes no scores. In several processes each counts
    its own rows, unless the loss has a `group`, and the first process logs. A resumed run starts to
    count again. Returns the `Metrics`, which `fastsim train` restores.
    """
    counts, step = Metrics(), trainer.training_step

    @functools.wraps(step)
    def training_step(*arguments, **options):
        if trainer.args.torch_compile or not _observes(trainer.args.device):
            return step(*arguments, **options)
        with metrics(counts):
            return step(*arguments, **options)

    trainer.training_step = training_step
    # Before the reporters, so that they get the metrics too.
    trainer.callback_handler.callbacks.insert(0, _Log(counts, prefix))
    return counts


def _observes(device):
    """Whether the backend that losses on the device take observes scores."""
    return pick(None, torch.empty(1, device=device), kind="softmax").records_metrics


class _Log(transformers.TrainerCallback):
    def __init__(self, counts, prefix):
        self.counts, self.prefix = counts, prefix

    def on_train_begin(self, args, state, control, **more):
        self.counts.clear()

    def on_log(self, args, state, control, logs=None, **more):
        if not logs or "loss" not in logs:
            return
        values = {f"{self.prefix}{name}": value for name, value in self.counts.read().items()}
        self.counts.clear()
        logs.update(values)
        state.log_history[-1].update(values)
