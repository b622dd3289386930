"""transformers.Trainer around an encoder and a loss of fastsim."""

import hashlib
import json
import math
from pathlib import Path

import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import nn

from fastsim.grad_cache import GradCache, MicroBatches
from fastsim.training.batches import SharedBatches, UniqueBatches
from fastsim.training.formats import DEALT


class BiEncoderModel(nn.Module):
    """What the trainer trains: an `Encoder` and an `Objective`, whose parameters learn with it."""

    def __init__(self, encoder, objective):
        super().__init__()
        self.encoder, self.objective = encoder, objective

    def forward(self, features, labels=None, exclude=None):
        """features: one dictionary of tensors per text column; labels (N,) or None.

        A dictionary alone: its embeddings, for the micro-batches of `GradCache`.
        """
        if isinstance(features, dict):
            return self.encoder(features)
        return {"loss": self.objective([self.encoder(part) for part in features], labels, exclude)}


class CrossEncoderModel(nn.Module):
    """A `CrossEncoder` with a loss on its logits."""

    def __init__(self, encoder, loss, group=None):
        super().__init__()
        self.encoder, self.loss, self.group = encoder, loss, group

    def forward(self, features, labels=None):
        """features: the tensors of the joint input; labels (N,) in [0, 1]."""
        return {"loss": self.loss(self.encoder(features), labels, group=self.group)}


class Bound(nn.Module):
    """An `Objective` with the further arguments of a batch: a loss of embeddings alone."""

    def __init__(self, objective, **arguments):
        super().__init__()
        self.objective, self.arguments = objective, arguments

    def forward(self, *vectors):
        """vectors: one (N, D) tensor per text column."""
        return self.objective(list(vectors), **self.arguments)


class Collator:
    """Rows of a data set as the arguments of `BiEncoderModel` or `CrossEncoderModel`.

    micro_batch_size: each text column as `MicroBatches`. exclude: whether a candidate with the text
    of an anchor's positive is to be left out; ids made of the texts say which.
    """

    def __init__(self, encoder, layout, *, cross=False, micro_batch_size=None, exclude=False):
        self.encoder, self.layout, self.cross = encoder, layout, cross
        self.micro_batch_size, self.exclude = micro_batch_size, exclude

    def __call__(self, rows):
        columns = [[row[name] for row in rows] for name in self.layout.texts]
        if self.cross:
            batch = {"features": self.encoder.tokenize(*columns)}
        else:
            prompt = self.encoder.prompts.get(self.encoder.default_prompt, "")
            texts = [[prompt + text for text in column] for column in columns]
            batch = {"features": [self._tokenize(column) for column in texts]}
        if self.exclude:
            numbers = [torch.tensor(list(map(text_id, column))) for column in columns[1:]]
            batch["exclude"] = numbers[0], torch.cat(numbers)
        if self.layout.label is not None:
            batch["labels"] = torch.tensor([row[self.layout.label] for row in rows])
        return batch

    def _tokenize(self, texts):
        if self.micro_batch_size is None:
            return self.encoder.tokenize(texts)
        # Each padded to its own longest text.
        parts = MicroBatches.of(texts, self.micro_batch_size)
        return MicroBatches(self.encoder.tokenize(part) for part in parts)


def text_id(text):
    """A number of 64 bits that is the same for the same text in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def freeze_idle(encoder, features):
    """Parameters that no embedding depends on (BERT's pooler) stop asking for a gradient.

    Processes that average gradients would wait for theirs. features: some input of the encoder.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        encoder(features).sum().backward()
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    encoder.zero_grad(set_to_none=True)


class _Loader(torch.utils.data.DataLoader):
    """A loader that hands the epoch on, as those that accelerate prepares."""

    def set_epoch(self, epoch):
        self.batch_sampler.set_epoch(epoch)


class Trainer(transformers.Trainer):
    """transformers.Trainer with batches free of duplicates and our evaluation.

    layout: the `Format` of train_dataset, whose labels are numbers. batch_size: rows of a batch
    over all processes. micro_batch_size: rows that are encoded at once, by `GradCache`; None: all.
    evaluation: None, or a function that returns metrics of the model being trained.
    loss_learning_rate: for the loss's own parameters, by default that of the encoder.
    """

    def __init__(
        self,
        *,
        layout,
        batch_size,
        micro_batch_size=None,
        evaluation=None,
        loss_learning_rate=None,
        **options,
    ):
        super().__init__(**options)
        self.layout, self.evaluation = layout, evaluation
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.loss_learning_rate = loss_learning_rate

    def get_train_dataloader(self):
        """Tuples and labelled texts in `UniqueBatches`, the rest as transformers shuffles them.

        Several processes share the batches that one would have.
        """
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if self.layout.name in DEALT:
            batches = self._unique_batches()
        elif ranks == 1:
            return super().get_train_dataloader()
        else:
            rows = SeedableRandomSampler(self.train_dataset, data_seed=self.args.data_seed)
            batches = torch.utils.data.BatchSampler(rows, self.batch_size, drop_last=False)
        if ranks > 1:
            batches = SharedBatches(batches, rank, ranks)
        loader = _Loader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # With several processes the batches are shared already; accelerate would do it again.
        return self.accelerator.prepare(loader) if ranks == 1 else loader

    def _unique_batches(self):
        columns = [list(self.train_dataset[name]) for name in self.layout.texts]
        if self.data_collator.exclude:
            columns = columns[:1]  # the others may be there twice
        names = {"groups": self.layout.label, "topics": self.layout.together}
        known = {key: list(self.train_dataset[name]) for key, name in names.items() if name}
        texts = list(zip(*columns, strict=True))
        return UniqueBatches(texts, self.batch_size, seed=self.args.seed, **known)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As in transformers, or with a micro_batch_size by `GradCache`."""
        if self.micro_batch_size is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        columns = inputs.pop("features")
        cache = GradCache(
            model, Bound(self.model.objective, **inputs), micro_batch_size=self.micro_batch_size
        )
        steps, scaler = self.current_gradient_accumulation_steps, self.accelerator.scaler
        with self.compute_loss_context_manager():
            value = cache.backward(
                *columns,
                scale=lambda loss: (loss if scaler is None else scaler.scale(loss)) / steps,
            )
        return value / steps

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
