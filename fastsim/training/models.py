"""The modules that are trained: an encoder together with its loss."""

import torch
from torch import nn


class BiEncoderModel(nn.Module):
    """An `Encoder` with an `Objective`, both of which may have parameters to train."""

    def __init__(self, encoder, objective):
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self._no_split_modules = _layers_of(encoder)

    def forward(self, features, labels=None, exclude=None, rows=None):
        """The loss. features: one dictionary of tensors per text column; labels (N,) or None.

        rows: the number of embeddings that the loss gets; None: all. If features is a single
        dictionary, the result is its embeddings, for the micro-batches of `GradCache`.
        """
        if isinstance(features, dict):
            return self.encoder(features)
        vectors = [self.encoder(part)[:rows] for part in features]
        return {"loss": self.objective(vectors, labels, exclude)}


class CrossEncoderModel(nn.Module):
    """A `CrossEncoder` with a loss on its logits."""

    def __init__(self, encoder, loss, group=None):
        super().__init__()
        self.encoder, self.loss, self.group = encoder, loss, group
        self._no_split_modules = _layers_of(encoder)

    def forward(self, features, labels=None, rows=None):
        """The loss. features: tensors of the pairs. labels: (N,) in [0, 1].

        rows: the number of logits that the loss gets; None: all.
        """
        return {"loss": self.loss(self.encoder(features)[:rows], labels, group=self.group)}


def _layers_of(encoder):
    """The class names of the layers that FSDP2 gathers one at a time, for accelerate."""
    names = getattr(encoder.model, "_no_split_modules", None) or []
    present = {type(module).__name__ for module in encoder.modules()}
    return [name for name in names if name in present]


class Bound(nn.Module):
    """An `Objective` with the labels and other arguments of a batch: a function of embeddings."""

    def __init__(self, objective, rows=None, **arguments):
        super().__init__()
        self.objective, self.rows, self.arguments = objective, rows, arguments

    def forward(self, *vectors):
        """vectors: one (N, D) tensor per text column."""
        return self.objective([part[: self.rows] for part in vectors], **self.arguments)


def freeze_idle(encoder, features):
    """Freeze the parameters that no embedding depends on, such as BERT's pooler.

    Processes that average gradients would wait for gradients of these. features: any input of the
    encoder.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        encoder(features).sum().backward()
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    encoder.zero_grad(set_to_none=True)
