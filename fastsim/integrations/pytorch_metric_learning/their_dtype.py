"""The dtype in which pytorch-metric-learning returns a loss."""

import copy

import torch

from fastsim.integrations.dtypes import in_their_dtype

_PACKAGE = "pytorch_metric_learning."


class TheirDtype:
    """Mixed in before a loss of theirs: `forward` returns the dtype of their loss.

    What a reducer returns that is no tensor is left as it is.
    """

    positive = ()  # names of the options that have to be above 0, numbers or tensors

    def forward(self, embeddings, *inputs, **options):
        """The loss of embeddings (N, D) with labels, pairs or triplets, and references."""
        loss = super().forward(embeddings, *inputs, **options)
        if not isinstance(loss, torch.Tensor):
            return loss
        kind = next(k for k in type(self).__mro__ if k.__module__.startswith(_PACKAGE))
        numbers = {name: getattr(self, name) for name in self.positive}

        def call():
            # torch computes Euclidean distances of bfloat16 only from 26 rows on.
            rows = embeddings.detach().new_ones(26, embeddings.shape[1])
            classes = torch.arange(26, device=rows.device) % 2
            options = {"distance": copy.copy(self.distance), "reducer": copy.deepcopy(self.reducer)}
            return kind(**options, **numbers, **self.small_options(rows.shape[1]))(rows, classes)

        # All reducers count: a sum of several has the dtype of the embeddings.
        owner = kind, type(self.distance), *map(type, self.reducer.modules())
        return in_their_dtype(loss, owner, call, embeddings, *numbers.values())

    def small_options(self, width):
        """Further options of their class for a small loss: rows (M, width) of two classes."""
        return {}
