"""What a resumed run takes over from its checkpoint, besides what transformers does."""

import json
from pathlib import Path

import torch
import transformers

from fastsim.precision import wide_dtype

_SUMMED = "fastsim_loss_sum.json"


class Resumed(transformers.TrainerCallback):
    """Sets what the training goes on with, so that its end is that of a run without a break.

    The best model is found in the folder of the checkpoints as it is named now. Early stopping has
    waited as long as before. The next loss that is logged is the mean since the one logged last, as
    are the metrics of the batches. What is logged at the end is of all parts of the training.
    say: is told of a best model that cannot be used; the best is then chosen from here on.
    """

    def __init__(self, trainer, checkpoint, say):
        self.trainer, self.checkpoint = trainer, Path(checkpoint)
        self.state = transformers.TrainerState.load_from_json(checkpoint / "trainer_state.json")
        self.best = self._best(say)
        waited = self.state.stateful_callbacks.get("EarlyStoppingCallback", {})
        self.waited = waited.get("attributes", {}).get("early_stopping_patience_counter", 0)
        file = self.checkpoint / _SUMMED
        self.summed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.seconds = self.summed.get("seconds", 0.0)  # of training until the checkpoint

    def _best(self, say):
        if self.state.best_model_checkpoint is None:
            return None
        # What is damaged was removed before.
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
            # One that the run did not have before; transformers writes to its entry.
            state.stateful_callbacks.setdefault(type(stopping).__name__, stopping.state())
        self.trainer._total_loss_scalar = _sum_of_logged(state.log_history)
        if self.summed:
            self.trainer._tr_loss.fill_(self.summed["sum"])
            self.trainer._globalstep_last_logged = self.summed["logged"]
        if self.summed.get("seen") is not None:
            dtype = wide_dtype(args.device)
            totals = torch.tensor(self.summed["seen"], dtype=dtype, device=args.device)
            self.trainer.seen.add(totals)

    def on_epoch_begin(self, args, state, control, *, train_dataloader, **more):
        # Where batches of the epoch are skipped, transformers hands it on only since 5.17.
        batches = train_dataloader.batch_sampler
        if hasattr(batches, "set_epoch"):
            batches.set_epoch(int(state.epoch))

    def complete(self, logs):
        """Make what is logged at the end of the training that of all its parts.

        transformers has the time of the last part, and its steps a second.
        """
        step, seconds = self.trainer.state.global_step, self.seconds + logs["train_runtime"]
        logs["train_runtime"] = round(seconds, 4)
        logs["train_steps_per_second"] = round(step / seconds, 3)


def _sum_of_logged(history):
    """The losses of all steps until the last that was logged: each entry is a mean of some."""
    total, last = 0.0, 0
    for entry in history:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - last)
            last = entry["step"]
    return total


def write_sums(trainer, folder):
    """Write the sum of the losses since the last that was logged: of a mean over the processes.

    Beside it what they saw of their batches since then, which a loss of a group adds up over the
    processes itself; and the seconds that the training took so far.
    """
    total = trainer.accelerator.gather(trainer._tr_loss.detach()).mean().item()
    if trainer.args.should_save:
        seen = trainer.seen._total
        summed = {
            "sum": total,
            "seen": None if seen is None else seen.tolist(),
            "logged": trainer._globalstep_last_logged,
            "seconds": trainer.seconds(),
        }
        (Path(folder) / _SUMMED).write_text(json.dumps(summed), encoding="utf-8")
