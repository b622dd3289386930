"""Restores the state of a resumed run that transformers does not restore."""

import json
from pathlib import Path

import torch
import transformers

from fastsim.precision import wide_dtype

_SUMS = "fastsim_loss_sum.json"


class Resumed(transformers.TrainerCallback):
    """Restores state, so that a resumed run ends like an uninterrupted one.

    The best model is looked up in the current folder of the checkpoints. The counter of early
    stopping continues. The next log covers the steps since the last log, for the loss and for the
    metrics of the batches. The final log covers the whole training.
    say: a function of one line of text, called if the best model is missing; then the best one of
    the remaining steps is selected.
    """

    def __init__(self, trainer, checkpoint, say):
        self.trainer, self.checkpoint = trainer, Path(checkpoint)
        self.state = transformers.TrainerState.load_from_json(checkpoint / "trainer_state.json")
        self.best = self._best(say)
        stopping = self.state.stateful_callbacks.get("EarlyStoppingCallback", {})
        self.waited = stopping.get("attributes", {}).get("early_stopping_patience_counter", 0)
        file = self.checkpoint / _SUMS
        self.sums = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.seconds = self.sums.get("seconds", 0.0)  # of training until the checkpoint

    def _best(self, say):
        if self.state.best_model_checkpoint is None:
            return None
        # If it exists it is usable: damaged checkpoints were removed before.
        path = self.checkpoint.with_name(Path(self.state.best_model_checkpoint).name)
        if path.is_dir():
            return path
        say(f"{path.name}, the best model so far, cannot be used: it is missing")
        return None

    def stopped_early(self):
        """Whether early stopping ended the training at the checkpoint."""
        return any(self.waited >= stopping.early_stopping_patience for stopping in self._stopping())

    def _stopping(self):
        return [
            callback
            for callback in self.trainer.callback_handler.callbacks
            if isinstance(callback, transformers.EarlyStoppingCallback)
        ]

    def on_train_begin(self, args, state, control, **more):
        if self.best is None:
            state.best_metric = state.best_global_step = None
        state.best_model_checkpoint = None if self.best is None else str(self.best)
        for stopping in self._stopping():
            stopping.early_stopping_patience_counter = self.waited
            # An entry for a callback that is new to the run, which transformers expects.
            state.stateful_callbacks.setdefault(type(stopping).__name__, stopping.state())
        self.trainer._total_loss_scalar = self.logged_loss()
        if self.sums:
            self.trainer._tr_loss.fill_(self.sums["sum"])
            self.trainer._globalstep_last_logged = self.sums["logged"]
        if self.sums.get("seen") is not None:
            dtype = wide_dtype(args.device)
            totals = torch.tensor(self.sums["seen"], dtype=dtype, device=args.device)
            self.trainer.batch_metrics.add(totals)

    def on_epoch_begin(self, args, state, control, *, train_dataloader, **more):
        # If a resumed run skips batches of an epoch, transformers sets the epoch only since 5.17.
        batches = train_dataloader.batch_sampler
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(int(state.epoch))

    def logged_loss(self):
        """The sum of the losses up to the last log, whose entries hold means over their steps."""
        total, last = 0.0, 0
        for entry in self.state.log_history:
            if "loss" in entry:
                total += entry["loss"] * (entry["step"] - last)
                last = entry["step"]
        return total

    def total_loss(self):
        """The sum of the losses up to the checkpoint."""
        return self.logged_loss() + self.sums.get("sum", 0.0)

    def complete(self, logs):
        """Correct the final log, in which transformers has only the time since the resumption."""
        step, seconds = self.trainer.state.global_step, self.seconds + logs["train_runtime"]
        logs["train_runtime"] = round(seconds, 4)
        logs["train_steps_per_second"] = round(step / seconds, 3)


def write_sums(trainer, folder):
    """Write the sum of the losses since the last log, averaged over the processes.

    The file also holds the metrics of the batches since then, and the seconds of training so far. A
    loss with a group sums the metrics over the processes itself.
    """
    total = trainer.accelerator.gather(trainer._tr_loss.detach()).mean().item()
    if trainer.args.should_save:
        totals = trainer.batch_metrics._total
        sums = {
            "sum": total,
            "seen": None if totals is None else totals.tolist(),
            "logged": trainer._globalstep_last_logged,
            "seconds": trainer.seconds(),
        }
        (Path(folder) / _SUMS).write_text(json.dumps(sums), encoding="utf-8")
