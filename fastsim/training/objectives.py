"""The losses that fit each format, and the objective: a loss with its learnt parameters."""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fastsim import losses
from fastsim.autocast import joined
from fastsim.distributed import join
from fastsim.scores import paired_cosine_similarity


def _pairs(loss, vectors, labels):
    return loss(vectors[0], vectors[1], labels)


def _candidates(loss, vectors, labels, **options):
    # All positives first, then the negatives column by column.
    return loss(vectors[0], joined(vectors[1:]), **options)


def _triplets(loss, vectors, labels):
    # Each column of negatives forms triplets with the anchors and positives.
    anchors, positives, *negatives = vectors
    parts = [loss(anchors, positives, negative) for negative in negatives]
    return torch.stack(parts).mean(0)


def _matrix(loss, vectors, labels):
    return loss(vectors[0], vectors[0], (labels, labels))


def _each_pair(loss, vectors, labels):
    return loss(vectors[0], None, (labels, labels))


def _groups(loss, vectors, labels):
    return loss(vectors[0], labels)


class PairCoSENT(losses.CoSENT):
    """CoSENT of the cosines of pairs of embeddings."""

    def forward(self, x, y, labels):
        return super().forward(paired_cosine_similarity(x, y), labels)


@dataclass(frozen=True)
class Loss:
    """A loss that can be trained: its module, its call for each format, the options it can learn.

    repeats: how equal texts in a batch of tuples are treated. "exclude": the loss excludes them
    from each other's negatives. "apart": it cannot, so they are put into different batches.
    "ignore": it uses no other row. minimum: the rows that a batch needs. positives: whether the
    loss needs several rows of one label.
    """

    module: type
    apply: dict
    learnable: tuple = ()
    repeats: str = "apart"
    minimum: int = 1
    positives: bool = False


LOSSES = {
    "cosent": Loss(PairCoSENT, {"scored pairs": _pairs}, ("scale",), minimum=2),
    "angle": Loss(losses.Angle, {"scored pairs": _pairs}, ("scale",), minimum=2),
    "cosine_regression": Loss(losses.CosineRegression, {"scored pairs": _pairs}),
    "info_nce": Loss(
        losses.InfoNCE, {"tuples": _candidates}, ("temperature",), repeats="exclude", minimum=2
    ),
    "decoupled_contrastive": Loss(
        losses.DecoupledContrastive, {"tuples": _candidates}, ("temperature",), minimum=2
    ),
    "full_triplet": Loss(losses.FullTriplet, {"tuples": _candidates}, repeats="exclude", minimum=2),
    "siglip": Loss(
        losses.SigLIP, {"tuples": _candidates, "labelled texts": _matrix}, ("scale", "bias")
    ),
    "triplet_margin": Loss(losses.TripletMargin, {"tuples": _triplets}, repeats="ignore"),
    "classification": Loss(losses.SoftmaxClassification, {"labelled pairs": _pairs}),
    "matrix_mse": Loss(losses.MatrixMSE, {"labelled texts": _matrix}),
    "matrix_cross_entropy": Loss(
        losses.MatrixCrossEntropy, {"labelled texts": _matrix}, ("temperature",)
    ),
    "cosent_matrix": Loss(
        losses.CoSENTMatrix, {"labelled texts": _each_pair}, ("scale",), minimum=3, positives=True
    ),
    "sup_con": Loss(
        losses.SupCon, {"labelled texts": _groups}, ("temperature",), minimum=3, positives=True
    ),
    "nt_xent": Loss(
        losses.NTXent, {"labelled texts": _groups}, ("temperature",), minimum=3, positives=True
    ),
    "multi_similarity": Loss(
        losses.MultiSimilarity, {"labelled texts": _groups}, minimum=3, positives=True
    ),
    "circle": Loss(losses.Circle, {"labelled texts": _groups}, minimum=3, positives=True),
    "batch_hard_triplet": Loss(
        losses.BatchHardTriplet, {"labelled texts": _groups}, minimum=3, positives=True
    ),
}
_TRIAL_ROWS = 4  # of `Objective.try_out`: two labels, each with a positive
_POSITIVE = ("scale", "temperature")  # learnt as logarithms, so that they stay above 0


def fitting(layout):
    """The names of the losses that can be trained on a `Format`."""
    fits = [name for name, loss in LOSSES.items() if layout.name in loss.apply]
    if layout.name == "tuples" and not layout.negatives:
        fits.remove("triplet_margin")
    return fits


def check_loss(name, layout):
    """ValueError that lists the losses for these columns, unless `name` is one of them."""
    fits = fitting(layout)
    if name in fits:
        return
    wanted = f"one of {', '.join(fits)} for the columns ({', '.join(layout.columns)})"
    hint = "" if name in LOSSES else f"; all losses: {', '.join(LOSSES)}"
    raise ValueError(f"loss: wanted {wanted}, got {name!r}{hint}")


class Objective(nn.Module):
    """A loss on the embeddings of a batch's text columns.

    name: one of `LOSSES`. layout: the `Format` of the data. options: of the loss (temperature,
    scale, margin, ...). learn: options that become parameters, initialised with their value; scale
    and temperature as logarithms. dim, classes: the width of the embeddings and the names of the
    classes, for "classification". group: a process group whose ranks each hold a share of the
    batch. widths: as for `fastsim.losses.Matryoshka`. ValueError for arguments that do not fit.
    """

    def __init__(
        self, name, layout, *, options=None, learn=(), dim=None, classes=(), group=None, widths=()
    ):
        super().__init__()
        check_loss(name, layout)
        spec = LOSSES[name]
        for option in learn:
            if option not in spec.learnable:
                wanted = f"one of {', '.join(spec.learnable)}" if spec.learnable else "nothing"
                raise ValueError(f"learn: wanted {wanted} for {name}, got {option!r}")
        self.name, self.classes, self.learn = name, tuple(classes), tuple(learn)
        self.options = dict(options or {})
        self.group, self.widths = group, tuple(widths)
        # Whether the loss of a row uses no other row: each process computes that of its own rows.
        self.pairwise = name in ("cosine_regression", "triplet_margin", "classification")
        if name == "classification":
            self._check_classification()
            self.loss = losses.SoftmaxClassification(dim, len(self.classes))
        else:
            self._check_options(spec)
            self.loss = spec.module(**self.options)
            if not self.pairwise:
                self.loss.group = group
        self._apply_loss = spec.apply[layout.name]
        self.learnt = nn.ParameterDict()
        for option in learn:
            # One-dimensional, as FSDP2 cannot shard 0-d tensors.
            start = torch.tensor([float(getattr(self.loss, option))])
            self.learnt[option] = nn.Parameter(start.log() if option in _POSITIVE else start)

    def _check_classification(self):
        """Refuses options and widths, which this loss does not have."""
        if self.widths:
            raise ValueError(
                "matryoshka: cannot be combined with the loss classification"
                f" (got widths {self.widths})"
            )
        if self.options:
            names = ", ".join(self.options)
            raise ValueError(f"loss_options: wanted none for classification, got {names}")

    def _check_options(self, spec):
        """Refuses options that the loss does not have, or of a wrong type."""
        parameters = dict(inspect.signature(spec.module).parameters)
        parameters.pop("group", None)  # set by the trainer
        if unknown := self.options.keys() - parameters.keys():
            raise ValueError(
                f"loss_options: wanted options of {self.name} ({', '.join(parameters)}),"
                f" got {', '.join(sorted(unknown))}"
            )
        for option, value in self.options.items():
            _check_type(option, value, parameters[option].default)
        reduction = self.options.get("reduction", "mean")
        if self.pairwise and self.group is not None and reduction != "mean":
            # Each process computes the loss of its own rows; then gradients are averaged.
            raise ValueError(f"reduction: wanted 'mean' in several processes, got {reduction!r}")

    def forward(self, vectors, labels=None, exclude=None):
        """The loss of embeddings, one (N, D) tensor per text column, and labels (N,) or None.

        exclude: for a loss with an option of this name.
        """
        for option, learnt in self.learnt.items():
            value = learnt.reshape(())
            # Not the Parameter itself, which the loss module would register: it is saved once.
            setattr(self.loss, option, value.exp() if option in _POSITIVE else value.clone())
        options = {} if exclude is None else {"exclude": exclude}
        loss = losses.Matryoshka(self.loss, self.widths) if self.widths else self.loss
        loss = self._apply_loss(loss, vectors, labels, **options)
        if self.pairwise and self.group is not None:
            # With this factor the average over the ranks is the mean over all rows.
            loss = loss * join(self.group, self.name, vectors[0], vectors[0]).mean_share
        return loss

    def try_out(self, layout, *, dim, dtype=torch.float32, device=None):
        """Raise the errors of the first step early: of the options, widths and backend of the loss.

        The trial is on random embeddings (4, dim), in this process alone. Learnt options are tried
        with their original value: the logarithm of a negative one is NaN, which no check refuses.
        """
        if self.name == "classification":  # it has no options
            return
        random = torch.Generator().manual_seed(0)  # leaves the random numbers of the run alone
        vectors = torch.randn(len(layout.texts), _TRIAL_ROWS, dim, generator=random)
        vectors = vectors.to(device, dtype).requires_grad_()  # a backend may refuse gradients
        values = {
            "score": torch.linspace(0, 1, _TRIAL_ROWS),
            "label": torch.arange(_TRIAL_ROWS) // 2,
        }
        labels = None if layout.label is None else values[layout.label].to(device)
        try:
            loss = LOSSES[self.name].module(**self.options)
            loss = losses.Matryoshka(loss, self.widths) if self.widths else loss
            value = self._apply_loss(loss, vectors.unbind(), labels)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.name}: {error}") from error
        if value.dim():
            raise ValueError(
                f"{self.name}: reduction: wanted one number for a batch ('mean' or 'sum'),"
                f" got {self.options['reduction']!r}"
            )

    def values(self):
        """The options, with the current values of learnt ones."""
        learnt = {
            name: (value.exp() if name in _POSITIVE else value).item()
            for name, value in self.learnt.items()
        }
        return {**self.options, **learnt}

    def write_to(self, folder):
        """Write `fastsim_loss.json` and, if there are parameters, `fastsim_loss.safetensors`."""
        from safetensors.torch import save_file

        state = {key: value.detach().contiguous() for key, value in self.state_dict().items()}
        about = {"loss": self.name, "options": self.values(), "learnt": list(self.learn)}
        about["classes"] = list(self.classes)
        text = json.dumps(about, indent=2)
        (Path(folder) / "fastsim_loss.json").write_text(text, encoding="utf-8")
        if state:
            save_file(state, Path(folder) / "fastsim_loss.safetensors")


def _check_type(name, value, default):
    """Refuse a value whose type differs from that of the option's default, if it has one."""
    wanted, types = None, ()
    if isinstance(default, bool):
        wanted, types = "true or false", (bool,)
    elif isinstance(default, (int, float)):
        wanted, types = "a number", (int, float, torch.Tensor)
    elif isinstance(default, str):
        wanted, types = "a text", (str,)
    # In Python a bool is an int, but only options with a bool as default take one.
    fits = isinstance(value, types) and (isinstance(value, bool) == (bool in types))
    if wanted is not None and not fits:
        raise ValueError(f"loss_options: {name}: wanted {wanted}, got {value!r}")


def read_classifier(folder, dim):
    """(SoftmaxClassification, class names) saved with a model, or None."""
    from safetensors.torch import load_file

    about, weights = (Path(folder) / f"fastsim_loss.{end}" for end in ("json", "safetensors"))
    if not about.is_file():
        return None
    saved = json.loads(about.read_text(encoding="utf-8"))
    if saved["loss"] != "classification":
        return None
    classifier = losses.SoftmaxClassification(dim, len(saved["classes"]))
    state = load_file(weights)
    classifier.load_state_dict({key.removeprefix("loss."): value for key, value in state.items()})
    return classifier, saved["classes"]
