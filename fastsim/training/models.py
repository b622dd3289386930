"""What the trainer trains: an encoder together with its loss."""

import torch
from torch import nn


class BiEncoderModel(nn.Module):
    """What the trainer trains: an `Encoder` and an `Objective`, whose parameters learn with it."""

    def __init__(self, encoder, objective):
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self._no_split_modules = _layers_of(encoder)

    def forward(self, features, labels=None, exclude=None, rows=None):
        """features: one dictionary of tensors per text column; labels (N,) or None.

        A dictionary alone: its embeddings, for the micro-batches of `GradCache`. rows: how many of
        the embeddings the loss gets, by default all.
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
        """features: the tensors of the joint input; labels (N,) in [0, 1]; rows: of the loss."""
        return {"loss": self.loss(self.encoder(features)[:rows], labels, group=self.group)}


def _layers_of(encoder):
    """Names of the classes of layers that FSDP2 gathers one by one, for accelerate."""
    names = getattr(encoder.model, "_no_split_modules", None) or []
    found = {type(module).__name__ for module in encoder.modules()}
    return [name for name in names if name in found]


class Bound(nn.Module):
    """An `Objective` with the further arguments of a batch: a loss of embeddings alone."""

    def __init__(self, objective, rows=None, **arguments):
        super().__init__()
        self.objective, self.rows, self.arguments = objective, rows, arguments

    def forward(self, *vectors):
        """vectors: one (N, D) tensor per text column."""
        return self.objective([part[: self.rows] for part in vectors], **self.arguments)


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
