"""Data, model and loss of a training run, checked against each other before anything starts."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fastsim.encoders.encoder import Encoder
from fastsim.scores import cosine_similarity, paired_cosine_similarity
from fastsim.training import evaluation
from fastsim.training.batch_plan import batch_plan
from fastsim.training.data import DataError, read_data
from fastsim.training.learnable import check_learnable
from fastsim.training.models import BiEncoderModel, CrossEncoderModel
from fastsim.training.objectives import Objective, check_loss
from fastsim.training.prompts import check_prompts, check_used, name_parts
from fastsim.training.schedule import check_schedule

SHOWN = 16  # texts a side in the picture of cosines
SCATTERED = 500  # pairs in the picture of similarities


@dataclass
class Task:
    """What is trained and on what; made by `prepare`."""

    model: torch.nn.Module
    encoder: torch.nn.Module
    train: object
    layout: object
    eval: object
    eval_layout: object
    metric: str | None
    cross: bool
    batch_size: int
    batches: object = None

    def evaluate(self):
        """Metrics of the model as it is now on the evaluation data."""
        if self.cross:
            return evaluation.evaluate_cross_encoder(
                self.encoder, self.eval, self.eval_layout, batch_size=self.batch_size
            )
        return evaluation.evaluate_encoder(
            self.encoder,
            self.eval,
            self.eval_layout,
            classifier=_classifier(self.model.objective),
            batch_size=self.batch_size,
            width=self.width,
        )

    @property
    def width(self):
        """How many numbers of an embedding are trained: the widest of Matryoshka, None for all."""
        return max(self.model.objective.widths, default=None)

    def sample(self):
        """Scores of a few rows for the pictures: the model as it is now."""
        data, layout = (
            (self.train, self.layout) if self.eval is None else (self.eval, self.eval_layout)
        )
        found = {}
        if not self.cross:
            rows = data.select(range(min(SHOWN, len(data))))
            vectors = [self._encode(rows, name) for name in layout.texts[:2]]
            found["heat"] = cosine_similarity(vectors[0], vectors[-1]).tolist()
        if layout.label == "score":
            rows = data.select(range(min(SCATTERED, len(data))))
            if self.cross:
                scores = self.encoder.score(*(rows[name][:] for name in layout.texts))
            else:
                parts = (self._encode(rows, name) for name in layout.texts)
                scores = paired_cosine_similarity(*parts)
            found |= {"gold": rows["score"][:], "scores": scores.tolist()}
        return found

    def _encode(self, rows, name):
        """Embeddings of a column, as they are trained."""
        prompt = self.encoder.prompt_of_column(name)
        return self.encoder.encode(rows[name][:], prompt=prompt)[:, : self.width]

    def features(self):
        """An input of the encoder: the first row's texts."""
        texts = [[self.train[0][name]] for name in self.layout.texts]
        features = self.encoder.tokenize(*(texts if self.cross else texts[:1]))
        return {name: value.to(self.encoder.device) for name, value in features.items()}

    def loss_values(self):
        """The options of the loss, learnt ones as they are now."""
        return {} if self.cross else self.model.objective.values()

    def write_to(self, folder):
        """The model's files, the loss's beside them."""
        self.encoder.write_to(folder)
        if not self.cross:
            self.model.objective.write_to(folder)


def prepare(options, group=None, say=None):
    """A `Task` from `Options`, or ValueError for what does not fit together.

    group: the process group that trains together, if there is one. say: is told how the reading
    goes on.
    """
    cross = options.architecture == "cross-encoder"
    gpu = torch.cuda.is_available() and not options.cpu
    if options.precision == "fp16" and not gpu:
        raise ValueError("precision: fp16 wants a GPU; on a CPU wanted bf16 or fp32")
    if options.score_range is not None:
        low, high = options.score_range
        if not (low < high and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"score_range: wanted LOW,HIGH with finite LOW < HIGH, got {low:g},{high:g}"
            )
    check_schedule(options.schedule)
    for name in ("best_metric", "early_stopping", "eval_steps", "eval_columns"):
        if getattr(options, name) and options.eval is None:
            raise ValueError(f"{name}: wanted with evaluation data (--eval), got none")
    check_prompts(options.prompts)
    reading = {
        "kind": options.kind,
        "delimiter": options.delimiter,
        "header": options.header,
        "skip_bad_rows": options.skip_bad_rows,
        "say": say,
    }
    train, layout = read_data(options.train, columns=options.columns, **reading)
    if cross:
        _check_cross(options, layout)
    else:
        check_loss(options.loss, layout)
    held, held_layout = None, None
    if options.eval is not None:
        held, held_layout = read_data(options.eval, columns=_eval_columns(options), **reading)
    if options.score_range is not None and layout.label != "score":
        raise ValueError(f"score_range: wanted with a column score, got {layout.name}")
    classes = _classes(train, layout) if options.loss == "classification" else None
    if held is not None:
        evaluation.check_evaluation(
            held, held_layout, cross_encoder=cross, classes=classes, name="eval"
        )
    train = _numbers(options, train, layout, classes, cross)
    check_learnable(
        options.loss,
        None if layout.label is None else train[layout.label][:],
        lambda name: train[name],
        layout,
        options.batch_size,
        cross=cross,
    )
    metric = held and _metric(
        options.best_metric, held_layout, cross_encoder=cross, classifier=classes is not None
    )
    from transformers import set_seed

    set_seed(options.seed)  # new layers start the same
    make = _cross_encoder if cross else _bi_encoder
    model, encoder = make(options, layout, classes, group)
    if not cross:
        held_texts = () if held is None else held_layout.texts
        check_used(options.prompts, encoder, dict.fromkeys(layout.texts + held_texts))
    if gpu:
        model.to("cuda")
    batches = None
    if not cross:
        _try_loss(options, model, layout)
        batches = batch_plan(train, layout, options.loss, options.batch_size, seed=options.seed)
    return Task(
        model, encoder, train, layout, held, held_layout, metric, cross, options.batch_size, batches
    )


def _eval_columns(options):
    return options.columns if options.eval_columns is None else options.eval_columns


def _metric(asked, layout, **kind):
    """The metric that chooses the best model: the one asked for, if the data have it."""
    known = evaluation.metric_names(layout, **kind)
    if asked is not None and asked not in known:
        raise ValueError(f"best_metric: wanted one of {', '.join(known)}, got {asked!r}")
    return asked or evaluation.primary_metric(layout, **kind)


def _bi_encoder(options, layout, classes, group):
    encoder = Encoder.from_pretrained(
        options.model,
        pooling=options.pooling,
        dense=options.dense,
        max_length=options.max_length,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    given = options.prompts or {}
    encoder.prompts |= given
    name_parts(encoder, given)
    if options.lora:
        encoder.add_lora(options.lora)
    if options.gradient_checkpointing:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(
            getattr(encoder.model, name) for name in names if hasattr(encoder.model, name)
        )
        enable({"use_reentrant": False})
        if options.lora:
            encoder.model.enable_input_require_grads()
    if options.weights == "bf16":
        encoder.model.to(torch.bfloat16)
    if options.compile:
        encoder.model.compile()  # in place: the names of the weights stay
    if options.matryoshka and max(options.matryoshka) > encoder.dim:
        raise ValueError(
            f"matryoshka: wanted widths of at most {encoder.dim}, got {max(options.matryoshka)}"
        )
    objective = Objective(
        options.loss,
        layout,
        options=options.loss_options,
        learn=options.learn,
        dim=encoder.dim,
        classes=classes or (),
        group=group,
        widths=options.matryoshka,
    )
    if options.loss_learning_rate is not None and next(objective.parameters(), None) is None:
        raise ValueError(
            f"loss_learning_rate: wanted with parameters of the loss (--learn), {options.loss} has"
            f" none here, got {options.loss_learning_rate:g}"
        )
    encoder.similarity = objective.options.get("similarity", encoder.similarity)
    return BiEncoderModel(encoder, objective), encoder


def _try_loss(options, model, layout):
    """Refuse what the loss would refuse in its first step, while nothing is written yet."""
    encoder = model.encoder
    like = next(encoder.parameters())
    kind = torch.float16 if options.precision == "fp16" else torch.bfloat16
    with torch.autocast(like.device.type, kind, enabled=options.precision != "fp32"):
        model.objective.try_out(layout, dim=encoder.dim, dtype=like.dtype, device=like.device)


def _cross_encoder(options, layout, classes, group):
    from fastsim.encoders.cross_encoder import CROSS_LOSSES, CrossEncoder

    encoder = CrossEncoder.from_pretrained(
        options.model,
        max_length=options.max_length,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    if options.loss == "regression":
        encoder.say_scores_are_logits()
    return CrossEncoderModel(encoder, CROSS_LOSSES[options.loss], group), encoder


def _check_cross(options, layout):
    from fastsim.encoders.cross_encoder import CROSS_FORMATS, CROSS_LOSSES

    if layout.name not in CROSS_FORMATS:
        wanted = " or ".join(CROSS_FORMATS)
        raise ValueError(f"columns: a cross-encoder wants {wanted}, got {layout.name}")
    if options.loss not in CROSS_LOSSES:
        wanted = ", ".join(CROSS_LOSSES)
        raise ValueError(f"loss: a cross-encoder can train {wanted}, got {options.loss!r}")
    for name in ("pooling", "dense", "loss_options", "learn", "loss_learning_rate", "prompts",
                 "micro_batch_size", "lora", "matryoshka", "gradient_checkpointing",
                 "compile"):  # fmt: skip
        if getattr(options, name):
            raise ValueError(f"{name}: a cross-encoder has none, got {getattr(options, name)!r}")
    if options.weights != "fp32":
        raise ValueError(f"weights: a cross-encoder has fp32, got {options.weights!r}")


def _classes(train, layout):
    names = sorted(set(train[layout.label][:]))
    if len(names) < 2:
        raise ValueError(f"label: classification wants two classes or more, got {names}")
    return names


def _numbers(options, train, layout, classes, cross):
    """The training data with labels as numbers."""
    if layout.label is None:
        return train
    values = train[layout.label][:]
    if layout.name == "scored pairs":
        if options.score_range is not None:
            low, high = options.score_range
            if not low <= min(values) <= max(values) <= high:
                raise DataError(
                    f"score: wanted scores in --score-range {low:g},{high:g}, got {min(values):g}"
                    f" to {max(values):g}"
                )
            values = [(value - low) / (high - low) for value in values]
        bounds = (0, 1) if cross else (-1, 1)
        bounded = options.loss in ("cosine_regression", "cross_entropy", "regression")
        if bounded and not bounds[0] <= min(values) <= max(values) <= bounds[1]:
            raise DataError(
                f"score: {options.loss} wants scores in {list(bounds)}, got {min(values):g} to"
                f" {max(values):g}; --score-range LOW,HIGH maps them to [0, 1]"
            )
        if options.score_range is None:
            return train
    elif cross:
        if not evaluation.is_binary(values):
            raise DataError("label: a cross-encoder wants labels 0 and 1, both there")
        values = [float(value) for value in evaluation.as_binary(values)]
    else:
        names = classes or list(dict.fromkeys(values))
        number = {name: i for i, name in enumerate(names)}
        values = [number[value] for value in values]
    # As an array: `datasets` makes a fingerprint of it, of a list number by number.
    return train.remove_columns(layout.label).add_column(layout.label, np.array(values))


def _classifier(objective):
    if objective.name != "classification":
        return None
    return objective.loss, list(objective.classes)
