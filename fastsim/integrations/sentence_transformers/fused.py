"""What the drop-in losses share: the note of an unfused option, checks, numbers that are learnt."""

import warnings

import torch
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator

_said = set()


class Fused:
    """Mixed in before a loss of sentence-transformers."""

    def unfused(self, option):
        """Says once for each loss that `option` is computed by sentence-transformers' own code."""
        name = type(self).__name__
        if (name, option) not in _said:
            _said.add((name, option))
            warnings.warn(
                f"{name}: {option} has no fused form; sentence-transformers' own code computes it,"
                " with its memory",
                stacklevel=3,
            )

    def get_config_dict(self):
        """The options, a learnt number as its value."""
        config = super().get_config_dict()
        return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in config.items()}


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


def check_columns(embeddings, *, all_reduce_min=2, most=None):
    """As many columns of embeddings as the loss takes, all of one shape."""
    count = len(embeddings)
    if count < all_reduce_min or (most is not None and count > most):
        wanted = f"at least {all_reduce_min}" if most is None else f"{all_reduce_min} to {most}"
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
