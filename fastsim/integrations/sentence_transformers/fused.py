"""What the drop-in losses share: whose code computes, checks, numbers that are learnt."""

import sys
from collections.abc import Hashable

import torch
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator
from sentence_transformers.util import cos_sim, dot_score, pytorch_cos_sim

from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import Hooked, say_once
from fastsim.integrations.sentence_transformers.their_module import InTheirModule

SIMILARITIES = {cos_sim: "cosine", pytorch_cos_sim: "cosine", dot_score: "dot"}
CROSS_ENTROPY = torch.nn.CrossEntropyLoss()


class Replacement(InTheirModule, Hooked):
    """Mixed in before a loss of sentence-transformers whose code computes what is not fused."""

    def unfused_option(self):
        """The option without a fused form, or what has been replaced, or None."""
        return self.replaced_hook()

    def say_unfused(self, option, *, stacklevel=3):
        """Says once for each loss that `option` is computed by sentence-transformers' own code."""
        sentence = f"{option} has no fused form"
        say_once(self, sentence, "sentence-transformers", stacklevel=stacklevel + 1)


class Fused(Replacement):
    """Mixed in before a loss of embeddings, which `fused(embeddings, labels)` computes.

    The columns that `fused` is given have one dtype.
    """

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns, each (N, D), with the labels that it takes -> scalar."""
        theirs = super().compute_loss_from_embeddings
        if self.is_theirs(embeddings):
            return theirs(embeddings, labels)
        loss = self.fused(in_one_dtype(*embeddings), labels)

        def few(*rows):
            return theirs(list(rows), None if labels is None else labels[:2])

        return self.in_their_dtype(loss, few, embeddings)

    def is_theirs(self, embeddings, *, stacklevel=4):
        """Whether their code computes these, which is said unless there are no rows."""
        option = self.unfused_option()
        if option is not None:
            self.say_unfused(option, stacklevel=stacklevel)
        return option is not None or len(embeddings[0]) == 0

    def in_their_dtype(self, loss, theirs, embeddings):
        """The loss in the dtype of theirs(*columns), of two rows of each column."""
        called = ("distance_metric", "similarity_fct", "loss_fct")
        owner = type(self), *(code_of(getattr(self, name, None)) for name in called)

        def call():
            return theirs(*(column.detach()[:2] for column in embeddings))

        return as_theirs(loss, owner, call, *embeddings)

    def get_config_dict(self):
        """The options, a learnt number as its value."""
        config = super().get_config_dict()
        return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in config.items()}


def of_theirs(table, called, default=None):
    """table[called]; of what is not there, or cannot be hashed, `default`."""
    return table.get(called, default) if isinstance(called, Hashable) else default


def gathering(loss):
    """A method: (the columns of all ranks with their gradient, this rank's number).

    By the functions that the module of their `loss` has under these names when they are called, so
    that a patch of one runs.
    """
    home = sys.modules[loss.__module__]

    def gathered(self, columns):
        return [home.all_gather_with_grad(column) for column in columns], home.get_rank()

    return gathered


class LearntInCache:
    """A cached loss whose number (`learnt`, the attribute's name) may be a Parameter.

    The loss stage runs backward on its own, long before the gradient of the returned loss (of a
    gradient scaler, of gradient accumulation) is known. So the number's derivative is kept there,
    and the returned loss carries it.
    """

    learnt = None
    _derivative = None

    def loss_stage(self, with_backward, compute):
        """compute(number), run backward if asked; the number's derivative is kept."""
        number = getattr(self, self.learnt)
        learns = isinstance(number, torch.Tensor) and number.requires_grad
        if not with_backward:
            return compute(number)
        if learns and isinstance(self.__dict__.get("calculate_loss"), CachedLossDecorator):
            raise ValueError(
                f"{self.learnt}: wanted a number under MatryoshkaLoss, whose weights a cached loss"
                " does not see, got a Parameter; the loss without cache learns it"
            )
        number = number.detach().requires_grad_() if learns else number
        loss = compute(number)
        loss.backward()
        self._derivative = number.grad if learns else None
        return loss.detach()

    def forward(self, sentence_features, labels):
        """The loss of a batch of tokenized columns."""
        loss = super().forward(sentence_features, labels)
        if self._derivative is not None:
            number = getattr(self, self.learnt)
            loss = loss + (number - number.detach()) * self._derivative
            self._derivative = None
        return loss


def check_columns(embeddings, *, fewest=2, most=None):
    """As many columns of embeddings as the loss takes, all of one shape."""
    count = len(embeddings)
    if count < fewest or (most is not None and count > most):
        wanted = f"at least {fewest}" if most is None else f"{fewest} to {most}"
        wanted = str(most) if fewest == most else wanted
        raise ValueError(f"Expected {wanted} embeddings, got {count}")
    shapes = [tuple(column.shape) for column in embeddings]
    if len(set(shapes)) > 1:
        raise ValueError(f"embeddings: wanted columns of one shape, got {shapes}")


def check_labels(loss, labels, count):
    """Labels, one per example, as (count,)."""
    if labels.numel() != count:
        raise ValueError(
            f"{type(loss).__name__} expects {count} labels (one per example), "
            f"but got {labels.numel()} labels with shape {tuple(labels.shape)}."
        )
    return labels.view(-1)


def class_labels(loss, labels, count):
    """Class labels of any dtype as (count,) integers."""
    labels = check_labels(loss, labels, count)
    if labels.is_floating_point():
        return labels.unique(return_inverse=True)[1]
    return labels.to(torch.int64)
