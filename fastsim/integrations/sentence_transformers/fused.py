"""What the drop-in losses share: the choice of fused or peer code, checks, learnt numbers."""

import sys
from collections.abc import Hashable

import torch
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator
from sentence_transformers.util import cos_sim, dot_score, pytorch_cos_sim

from fastsim.integrations.dtypes import function_key, in_one_dtype, in_their_dtype
from fastsim.integrations.overrides import Hooked
from fastsim.integrations.sentence_transformers.their_module import InTheirModule

SIMILARITIES = {cos_sim: "cosine", pytorch_cos_sim: "cosine", dot_score: "dot"}
CROSS_ENTROPY = torch.nn.CrossEntropyLoss()


class Replacement(InTheirModule, Hooked):
    """Mixed in before a loss of sentence-transformers, whose code computes what is not fused."""

    _package = "sentence-transformers"


class Fused(Replacement):
    """Mixed in before a loss of embeddings, which `fused(embeddings, labels)` computes.

    `fused` is given columns of one dtype.
    """

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns, each (N, D), with the labels that it takes -> scalar."""
        theirs = super().compute_loss_from_embeddings
        if self.needs_theirs(embeddings):
            return theirs(embeddings, labels)
        loss = self.fused(in_one_dtype(*embeddings), labels)

        def theirs_on_rows(*rows):
            return theirs(list(rows), None if labels is None else labels[:2])

        return self.in_their_dtype(loss, theirs_on_rows, embeddings)

    def needs_theirs(self, embeddings):
        """Whether their code has to compute the loss: it is not fused, or there are no rows."""
        return self.is_unfused() or len(embeddings[0]) == 0

    def in_their_dtype(self, loss, theirs, embeddings, *others):
        """The loss in the dtype of theirs(*columns), called with two rows of each column.

        others: further inputs of the loss whose dtypes count, such as labels.
        """
        functions = ("distance_metric", "similarity_fct", "loss_fct")
        owner = type(self), *(function_key(getattr(self, name, None)) for name in functions)
        numbers = (getattr(self, name, None) for name in ("scale", "temperature"))

        def call():
            return theirs(*(column.detach()[:2] for column in embeddings))

        return in_their_dtype(loss, owner, call, *embeddings, *others, *numbers)

    def get_config_dict(self):
        """The options, with the value of a learnt number."""
        return as_numbers(super().get_config_dict())


def as_numbers(config):
    """A dictionary of options with the values of its tensors."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in config.items()
    }


def lookup(table, key, default=None):
    """table.get(key, default), also for a key that cannot be hashed."""
    return table.get(key, default) if isinstance(key, Hashable) else default


def gathering(loss):
    """A method that returns (the columns of all ranks with their gradient, this rank's number).

    It looks up the functions in the module of their `loss` at each call, so that a patch of them
    takes effect.
    """
    module = sys.modules[loss.__module__]

    def gathered(self, columns):
        return [module.all_gather_with_grad(column) for column in columns], module.get_rank()

    return gathered


class LearntInCache:
    """A cached loss with a number that may be a Parameter; `learnt` is the attribute's name.

    The loss stage runs backward on its own, before the gradient of the returned loss is known,
    which may be scaled (gradient scaler, gradient accumulation). It therefore keeps the derivative
    with respect to the number, and `forward` attaches it to the returned loss.
    """

    learnt = None
    _derivative = None

    def loss_stage(self, with_backward, compute):
        """compute(number), with a backward pass if `with_backward`; keeps the derivative."""
        number = getattr(self, self.learnt)
        learns = isinstance(number, torch.Tensor) and number.requires_grad
        if not with_backward:
            return compute(number)
        if learns and isinstance(self.__dict__.get("calculate_loss"), CachedLossDecorator):
            raise ValueError(
                f"{self.learnt}: wanted a number under MatryoshkaLoss, got a Parameter, which a"
                " cached loss cannot learn with its weights; use the loss without cache"
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
            learnt = (number - number.detach()) * self._derivative  # 0, with the derivative
            loss = loss + learnt.to(loss.dtype)
            self._derivative = None
        return loss


def check_columns(embeddings, *, least=2, most=None):
    """`least` to `most` columns of embeddings, all of one shape."""
    count = len(embeddings)
    if count < least or (most is not None and count > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        wanted = str(most) if least == most else wanted
        # In the words of sentence-transformers, which users may match.
        raise ValueError(f"Expected {wanted} embeddings, got {count}")
    shapes = [tuple(column.shape) for column in embeddings]
    if len(set(shapes)) > 1:
        raise ValueError(f"embeddings: wanted columns of one shape, got {shapes}")


def check_labels(loss, labels, count):
    """Labels, one per example, as (count,)."""
    if labels.numel() != count:  # in the words of sentence-transformers
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
