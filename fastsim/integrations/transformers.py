"""What losses see of their batches, in the logs of transformers' trainers.

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
    """Has a trainer log `fastsim.metrics` of its training batches wherever it logs the loss.

    trainer: a transformers.Trainer, or a subclass as sentence-transformers'. prefix: before the
    names that `Metrics.read` says, in the log and with every reporter (TensorBoard, W&B).

    Each value is over the steps since the last one that was logged. Nothing is logged of losses
    that are not fastsim's, or that `fastsim.metrics` does not see; nor where the trainer compiles
    its model, or where the losses' backend does not look, which is not changed for it. In several
    processes each counts its own rows unless the loss has a `group`; the first process logs. A run
    that is resumed begins to count anew; returned is what counts, which `fastsim train` restores.
    """
    seen, step = Metrics(), trainer.training_step

    @functools.wraps(step)
    def training_step(*arguments, **options):
        if trainer.args.torch_compile or not _looks(trainer.args.device):
            return step(*arguments, **options)
        with metrics(seen):
            return step(*arguments, **options)

    trainer.training_step = training_step
    # Before the reporters, which log what they are told then.
    trainer.callback_handler.callbacks.insert(0, _Log(seen, prefix))
    return seen


def _looks(device):
    """Whether losses on the device take a backend that looks at scores."""
    return pick(None, torch.empty(1, device=device), kind="softmax").observes


class _Log(transformers.TrainerCallback):
    def __init__(self, seen, prefix):
        self.seen, self.prefix = seen, prefix

    def on_train_begin(self, args, state, control, **more):
        self.seen.clear()

    def on_log(self, args, state, control, logs=None, **more):
        if not logs or "loss" not in logs:
            return
        found = {f"{self.prefix}{name}": value for name, value in self.seen.read().items()}
        self.seen.clear()
        logs.update(found)
        state.log_history[-1].update(found)
