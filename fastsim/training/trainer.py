"""transformers.Trainer around an encoder and a loss of fastsim."""

import json
import math
from pathlib import Path

import torch
import transformers
from torch import nn

from fastsim.training.batches import UniqueBatches


class BiEncoderModel(nn.Module):
    """What the trainer trains: an `Encoder` and an `Objective`, whose parameters learn with it."""

    def __init__(self, encoder, objective):
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, features, labels=None):
        """features: one dictionary of tensors per text column; labels (N,) or None."""
        return {"loss": self.objective([self.encoder(part) for part in features], labels)}


class CrossEncoderModel(nn.Module):
    """A `CrossEncoder` with a loss on its logits."""

    def __init__(self, encoder, loss):
        super().__init__()
        self.encoder, self.loss = encoder, loss

    def forward(self, features, labels=None):
        """features: the tensors of the joint input; labels (N,) in [0, 1]."""
        return {"loss": self.loss(self.encoder(features), labels)}


class Collator:
    """Rows of a data set as the arguments of `BiEncoderModel` or `CrossEncoderModel`."""

    def __init__(self, encoder, layout, *, cross=False):
        self.encoder, self.layout, self.cross = encoder, layout, cross

    def __call__(self, rows):
        columns = [[row[name] for row in rows] for name in self.layout.texts]
        if self.cross:
            batch = {"features": self.encoder.tokenize(*columns)}
        else:
            prompt = self.encoder.prompts.get(self.encoder.default_prompt, "")
            texts = [[prompt + text for text in column] for column in columns]
            batch = {"features": [self.encoder.tokenize(column) for column in texts]}
        if self.layout.label is not None:
            batch["labels"] = torch.tensor([row[self.layout.label] for row in rows])
        return batch


class _Loader(torch.utils.data.DataLoader):
    """A loader that hands the epoch on, as those that accelerate prepares."""

    def set_epoch(self, epoch):
        self.batch_sampler.set_epoch(epoch)


class Trainer(transformers.Trainer):
    """transformers.Trainer with batches free of duplicates and our evaluation.

    layout: the `Format` of train_dataset, whose labels are numbers. evaluation: None, or a function
    that returns metrics of the model being trained. loss_learning_rate: for the loss's own
    parameters, by default that of the encoder.
    """

    def __init__(self, *, layout, evaluation=None, loss_learning_rate=None, **options):
        super().__init__(**options)
        self.layout, self.evaluation = layout, evaluation
        self.loss_learning_rate = loss_learning_rate

    def get_train_dataloader(self):
        """Tuples and labelled texts in `UniqueBatches`, the rest as transformers shuffles them."""
        if self.layout.name not in ("tuples", "labelled texts"):
            return super().get_train_dataloader()
        columns = [list(self.train_dataset[name]) for name in self.layout.texts]
        groups = self.layout.label and list(self.train_dataset[self.layout.label])
        batches = UniqueBatches(
            list(zip(*columns, strict=True)),
            self._train_batch_size,
            seed=self.args.seed,
            groups=groups,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
        )
        loader = _Loader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # With several processes the batches are shared already; accelerate would do it again.
        return self.accelerator.prepare(loader) if self.accelerator.num_processes == 1 else loader

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The metrics of `evaluation`, logged under `eval_...`."""
        found = self.evaluation()
        found = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def log(self, logs, start_time=None):
        """As in transformers, but a loss that is not finite ends the training."""
        loss = logs.get("loss", 0.0)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} by step {self.state.global_step}:"
                " try a smaller learning rate or --precision fp32"
            )
        super().log(logs, start_time)

    def get_decay_parameter_names(self, model):
        """As in transformers, without the loss's own numbers."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.startswith("objective.learnt.")]

    def create_optimizer(self, model=None):
        """As in transformers, the loss's own parameters with their own learning rate."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        objective = getattr(self.model, "objective", None)
        if fresh and self.loss_learning_rate is not None and objective is not None:
            own = {id(parameter) for parameter in objective.parameters()}
            for group in list(optimizer.param_groups):
                ours = [p for p in group["params"] if id(p) in own]
                if ours:
                    group["params"] = [p for p in group["params"] if id(p) not in own]
                    kept = {key: value for key, value in group.items() if key != "params"}
                    optimizer.add_param_group(
                        {**kept, "params": ours, "lr": self.loss_learning_rate}
                    )
        return optimizer


def last_checkpoint(folder):
    """The newest complete checkpoint in a folder, or None.

    `trainer_state.json` is the last file that transformers writes: without it the process ended
    while the checkpoint was being written.
    """
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        found.append((state["global_step"], path))
    return max(found)[1] if found else None
