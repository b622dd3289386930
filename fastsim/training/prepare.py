"""The data, model and loss of a training run, checked together before it starts."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fastsim.encoders.encoder import Encoder
from fastsim.scores import cosine_similarity
from fastsim.training import evaluation
from fastsim.training.batch_plan import batch_plan
from fastsim.training.data import DataError, read_data
from fastsim.training.learnable import check_learnable
from fastsim.training.metrics import SIMILARITIES
from fastsim.training.models import BiEncoderModel, CrossEncoderModel
from fastsim.training.objectives import Objective, check_loss
from fastsim.training.prompts import check_prompts, check_used, name_parts
from fastsim.training.schedule import check_schedule

HEAT_MAP_TEXTS = 16  # per side, in the picture of cosines
SCATTER_PAIRS = 500  # in the picture of similarities


@dataclass
class Data:
    """The checked data of a run, with labels as numbers.

    eval, eval_layout: None without evaluation data. classes: the names of the classes, for the loss
    "classification".
    """

    train: object
    layout: object
    eval: object
    eval_layout: object
    classes: list | None


@dataclass
class Task(Data):
    """A model with the data to train and evaluate it; made by `prepare`.

    metric: selects the best model; None without evaluation data.
    """

    model: torch.nn.Module
    encoder: torch.nn.Module
    metric: str | None
    cross: bool
    batch_size: int
    batches: object = None

    def evaluate(self):
        """Metrics of the current model on the evaluation data."""
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
        """The largest width of Matryoshka, at which embeddings are evaluated; else None."""
        return max(self.model.objective.widths, default=None)

    def sample(self):
        """Scores of the current model for a few rows, for the pictures."""
        data, layout = (
            (self.train, self.layout) if self.eval is None else (self.eval, self.eval_layout)
        )
        result = {}
        if not self.cross:
            rows = data.select(range(min(HEAT_MAP_TEXTS, len(data))))
            vectors = [self._encode(rows, name) for name in layout.texts[:2]]
            result["heat"] = cosine_similarity(vectors[0], vectors[-1]).tolist()
        if layout.label == "score":
            rows = data.select(range(min(SCATTER_PAIRS, len(data))))
            if self.cross:
                scores = self.encoder.score(*(rows[name][:] for name in layout.texts))
            else:
                parts = (self._encode(rows, name) for name in layout.texts)
                scores = SIMILARITIES[self.encoder.similarity](*parts)
            result |= {"gold": rows["score"][:], "scores": scores.tolist()}
        return result

    def _encode(self, rows, name):
        """Embeddings of a column at the trained width."""
        prompt = self.encoder.prompt_of_column(name)
        return self.encoder.encode(rows[name][:], prompt=prompt)[:, : self.width]

    def features(self):
        """An input of the encoder: the texts of the first row."""
        texts = [[self.train[0][name]] for name in self.layout.texts]
        features = self.encoder.tokenize(*(texts if self.cross else texts[:1]))
        return {name: value.to(self.encoder.device) for name, value in features.items()}

    def loss_values(self):
        """The options of the loss, with the current values of learnt ones."""
        return {} if self.cross else self.model.objective.values()

    def write_to(self, folder):
        """Write the files of the model and of the loss."""
        self.encoder.write_to(folder)
        if not self.cross:
            self.model.objective.write_to(folder)


def prepare(options, group=None, say=None):
    """A `Task` from `Options`; ValueError if options, data and model do not fit together.

    group: the process group that trains together, or None. say: a function of one line of text,
    called while data are read.
    """
    cross = options.architecture == "cross-encoder"
    gpu = torch.cuda.is_available() and not options.cpu
    _check_options(options, gpu)
    data = _prepare_data(options, cross, say)
    model, encoder = _prepare_model(options, data, cross, group)
    if gpu:
        model.to("cuda")
    batches = None
    if not cross:
        _try_loss(options, model, data.layout)
        batches = batch_plan(
            data.train, data.layout, options.loss, options.batch_size, seed=options.seed
        )
    return Task(
        **vars(data),
        model=model,
        encoder=encoder,
        metric=_metric(options.best_metric, data, encoder, cross),
        cross=cross,
        batch_size=options.batch_size,
        batches=batches,
    )


def _prepare_data(options, cross, say):
    """`Data`: read, and checked against the options."""
    train, layout, eval_data, eval_layout = _read_files(options, cross, say)
    if options.score_range is not None and layout.label != "score":
        raise ValueError(f"score_range: needs a column score, got {layout.name}")
    classes = _classes(train, layout) if options.loss == "classification" else None
    if eval_data is not None:
        evaluation.check_evaluation(
            eval_data, eval_layout, cross_encoder=cross, classes=classes, name="eval"
        )
        _check_metric(options.best_metric, eval_layout, cross, classes)
    train = _numeric_labels(options, train, layout, classes, cross)
    check_learnable(
        options.loss,
        None if layout.label is None else train[layout.label][:],
        lambda name: train[name],
        layout,
        options.batch_size,
        cross=cross,
    )
    return Data(train, layout, eval_data, eval_layout, classes)


def _read_files(options, cross, say):
    """(training data, its `Format`, evaluation data or None, its `Format` or None).

    The loss is checked as soon as the columns of the training data are known.
    """
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
    if options.eval is None:
        return train, layout, None, None
    return train, layout, *read_data(options.eval, columns=_eval_columns(options), **reading)


def _prepare_model(options, data, cross, group):
    """(the model, its encoder), with new layers initialised from the seed."""
    from transformers import set_seed

    set_seed(options.seed)  # for the initial weights of new layers
    make = _cross_encoder if cross else _bi_encoder
    model, encoder = make(options, data.layout, data.classes, group)
    if not cross:
        eval_texts = () if data.eval is None else data.eval_layout.texts
        check_used(options.prompts, encoder, dict.fromkeys(data.layout.texts + eval_texts))
    return model, encoder


def _check_options(options, gpu):
    """Refuse options that do not fit each other or the device, before data are read."""
    if options.precision == "fp16" and not gpu:
        raise ValueError("precision: wanted bf16 or fp32 on a CPU, got fp16, which needs a GPU")
    if options.score_range is not None:
        low, high = options.score_range
        if not (low < high and math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"score_range: wanted LOW,HIGH with finite LOW < HIGH, got {low:g},{high:g}"
            )
    check_schedule(options.schedule)
    for name in ("best_metric", "early_stopping", "eval_steps", "eval_columns"):
        if getattr(options, name) and options.eval is None:
            raise ValueError(f"{name}: needs evaluation data (--eval), got none")
    check_prompts(options.prompts)


def _eval_columns(options):
    return options.columns if options.eval_columns is None else options.eval_columns


def _check_metric(name, layout, cross, classes):
    """ValueError for a name that is no metric of the evaluation data; None is allowed."""
    kind = {"cross_encoder": cross, "classifier": classes is not None}
    names = evaluation.metric_names(layout, **kind)
    if name is not None and name not in names:
        raise ValueError(f"best_metric: wanted one of {', '.join(names)}, got {name!r}")


def _metric(name, data, encoder, cross):
    """The metric that selects the best model: `name`, or by default the primary one of the data."""
    if data.eval is None or name is not None:
        return name
    if cross:
        return evaluation.primary_metric(data.eval_layout, cross_encoder=True)
    return evaluation.primary_metric(
        data.eval_layout, classifier=data.classes is not None, similarity=encoder.similarity
    )


def _bi_encoder(options, layout, classes, group):
    encoder = Encoder.from_pretrained(
        options.model,
        pooling=options.pooling,
        dense=options.dense,
        max_length=options.max_length,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    prompts = options.prompts or {}
    encoder.prompts |= prompts
    name_parts(encoder, prompts)
    if options.lora:
        encoder.add_lora(options.lora)
    if options.gradient_checkpointing:
        _checkpoint_gradients(encoder.model, lora=options.lora)
    if options.weights == "bf16":
        encoder.model.to(torch.bfloat16)
    if options.compile:
        encoder.model.compile()  # in place, so that the names of the weights stay
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
            f"loss_learning_rate: needs a loss with parameters (--learn); {options.loss} has none"
            f" (got {options.loss_learning_rate:g})"
        )
    encoder.similarity = objective.options.get("similarity", encoder.similarity)
    return BiEncoderModel(encoder, objective), encoder


def _checkpoint_gradients(model, lora):
    """Make a model of transformers compute activations again in the backward pass."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()


def _try_loss(options, model, layout):
    """Raise errors of the first step of the loss now, before anything is written."""
    encoder = model.encoder
    weights = next(encoder.parameters())
    kind = torch.float16 if options.precision == "fp16" else torch.bfloat16
    with torch.autocast(weights.device.type, kind, enabled=options.precision != "fp32"):
        model.objective.try_out(layout, dim=encoder.dim, dtype=weights.dtype, device=weights.device)


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
        raise ValueError(f"columns: wanted {wanted} for a cross-encoder, got {layout.name}")
    if options.loss not in CROSS_LOSSES:
        wanted = ", ".join(CROSS_LOSSES)
        raise ValueError(f"loss: wanted one of {wanted} for a cross-encoder, got {options.loss!r}")
    for name in ("pooling", "dense", "loss_options", "learn", "loss_learning_rate", "prompts",
                 "micro_batch_size", "lora", "matryoshka", "gradient_checkpointing",
                 "compile"):  # fmt: skip
        if getattr(options, name):
            raise ValueError(
                f"{name}: cannot be combined with a cross-encoder (got {getattr(options, name)!r})"
            )
    if options.weights != "fp32":
        raise ValueError(f"weights: wanted fp32 for a cross-encoder, got {options.weights!r}")


def _classes(train, layout):
    names = sorted(set(train[layout.label][:]))
    if len(names) < 2:
        raise ValueError(f"label: wanted at least two classes for classification, got {names}")
    return names


def _numeric_labels(options, train, layout, classes, cross):
    """The training data with labels as numbers, and scores mapped from `score_range`."""
    if layout.label is None:
        return train
    values = train[layout.label][:]
    if layout.name == "scored pairs":
        scores = _scores(options, values, cross)
        if scores is values:
            return train
        values = scores
    elif cross:
        if not evaluation.is_binary(values):
            some = ", ".join(sorted({str(value) for value in values})[:5])
            raise DataError(f"label: wanted both labels 0 and 1 for a cross-encoder, got {some}")
        values = [float(value) for value in evaluation.as_binary(values)]
    else:
        names = classes or list(dict.fromkeys(values))
        number = {name: i for i, name in enumerate(names)}
        values = [number[value] for value in values]
    # An array, since `datasets` hashes a list number by number.
    return train.remove_columns(layout.label).add_column(layout.label, np.array(values))


def _scores(options, scores, cross):
    """The scores mapped from `score_range` to 0..1, unchanged without it; checked for the loss."""
    if options.score_range is not None:
        low, high = options.score_range
        if not low <= min(scores) <= max(scores) <= high:
            raise DataError(
                f"score: wanted scores in --score-range {low:g},{high:g}, got {min(scores):g}"
                f" to {max(scores):g}"
            )
        scores = [(score - low) / (high - low) for score in scores]
    lowest, highest = (0, 1) if cross else (-1, 1)
    is_bounded = options.loss in ("cosine_regression", "cross_entropy", "regression")
    if is_bounded and not lowest <= min(scores) <= max(scores) <= highest:
        raise DataError(
            f"score: wanted scores in [{lowest}, {highest}] for {options.loss}, got"
            f" {min(scores):g} to {max(scores):g}; --score-range LOW,HIGH maps them to [0, 1]"
        )
    return scores


def _classifier(objective):
    if objective.name != "classification":
        return None
    return objective.loss, list(objective.classes)
