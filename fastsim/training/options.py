"""The options of a training run, checked before anything is read."""

import json
import math
import os
from dataclasses import dataclass, fields
from typing import get_args

from fastsim.encoders.names import EMBEDDED

# Options that may differ when a run is resumed.
MAY_DIFFER = (
    "resume",
    "overwrite",
    "output",
    "progress",
    "verbose",
    "report_to",
    "logging_steps",
    "cpu",
    "checkpoints",
    "checkpoint_minutes",
    "keep_checkpoints",
    "trust_remote_code",
    "allow_pickle",
    "push_to_hub",
    "train",  # its content is compared instead
    "eval",
)
MAY_GROW = ("epochs", "max_steps")  # a resumed run may train longer
# Options that a resumed run may add if it had no evaluation data.
MAY_BE_ADDED = ("eval_data", "eval_columns", "eval_steps", "best_metric", "early_stopping")
CHOICES = {
    "architecture": ("bi-encoder", "cross-encoder"),
    "precision": ("fp32", "bf16", "fp16"),
    "weights": ("fp32", "bf16"),
}
LARGEST_SEED = 2**32 - 1  # the limit of NumPy


@dataclass
class Options:
    """The options of `fastsim train`; `fastsim train --help` explains each.

    Numbers may be those of any library. Paths become text; train and eval may be lists. TypeError
    for a type that differs from the annotation; ValueError for a value that is not allowed.
    """

    train: str | os.PathLike | list
    output: str | os.PathLike
    loss: str
    model: str | os.PathLike = EMBEDDED
    eval: str | os.PathLike | list | None = None
    columns: str | list | None = None
    eval_columns: str | list | None = None
    kind: str | None = None
    delimiter: str | None = None
    header: bool | None = None
    skip_bad_rows: bool = False
    score_range: tuple | None = None
    architecture: str = "bi-encoder"
    pooling: str | None = None
    dense: int | None = None
    loss_options: dict | None = None
    learn: tuple = ()
    loss_learning_rate: float | None = None
    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    accumulate: int = 1
    learning_rate: float = 5e-5
    warmup: float = 0.1
    schedule: str = "linear"
    weight_decay: float = 0.0
    max_length: int | None = None
    precision: str = "fp32"
    prompts: dict | None = None
    lora: int | None = None
    gradient_checkpointing: bool = False
    weights: str = "fp32"
    compile: bool = False
    matryoshka: tuple = ()
    seed: int = 0
    eval_steps: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0
    checkpoints: str | os.PathLike | None = None
    keep_checkpoints: bool = False
    logging_steps: int = 10
    best_metric: str | None = None
    early_stopping: int | None = None
    report_to: str = "none"
    cpu: bool = False
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    verbose: bool = False
    push_to_hub: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self):
        # Imported here, as it imports torch, which `fastsim --help` does not need.
        from fastsim.training.option_values import converted

        for field in fields(self):
            kinds = get_args(field.type) or (field.type,)
            setattr(self, field.name, converted(field.name, getattr(self, field.name), kinds))
        for name in ("epochs", "learning_rate", "loss_learning_rate", "checkpoint_minutes"):
            self._check_number(name, positive=True)
        for name in ("warmup", "weight_decay"):
            self._check_number(name)
        for name in ("max_steps", "batch_size", "micro_batch_size", "accumulate", "max_length",
                     "eval_steps", "checkpoint_steps", "logging_steps", "early_stopping",
                     "dense", "lora"):  # fmt: skip
            self._check_count(name)
        for name in ("output", "checkpoints"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}: wanted the name of a folder, got none")
        for name in ("train", "eval"):
            if getattr(self, name) == []:
                raise ValueError(f"{name}: wanted at least one file, got none")
        if self.resume and self.overwrite:
            raise ValueError(
                "overwrite: cannot be combined with resume, which continues from the checkpoints"
                " that overwrite removes"
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                wanted = ", ".join(choices[:-1]) + f" or {choices[-1]}"
                raise ValueError(f"{name}: wanted {wanted}, got {getattr(self, name)!r}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"seed: wanted 0 to {LARGEST_SEED}, got {self.seed}")
        both_set = self.eval is not None and self.eval_steps and self.checkpoint_steps
        if both_set and self.checkpoint_steps % self.eval_steps:
            raise ValueError(
                f"checkpoint_steps: wanted a multiple of eval_steps ({self.eval_steps}), so that"
                f" every checkpoint is evaluated, got {self.checkpoint_steps}"
            )

    def as_written(self):
        """{name: value} as read back from JSON; TypeError for a value that JSON cannot hold."""
        options = {}
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                options[field.name] = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{field.name}: wanted what JSON can hold, got {value!r:.80}: {error}"
                ) from error
        return options

    def _check_number(self, name, *, positive=False):
        value = getattr(self, name)
        if value is None:
            return
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            wanted = "above 0" if positive else "of at least 0"
            raise ValueError(f"{name}: wanted a finite number {wanted}, got {value}")

    def _check_count(self, name):
        value = getattr(self, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: wanted at least 1, got {value}")
