"""The dtype in which pytorch-metric-learning returns a loss."""

import copy

import torch

from fastsim.integrations.dtypes import as_theirs

_PACKAGE = "pytorch_metric_learning."


class TheirDtype:
    """forward with the dtype of their loss; of a reducer that gives no number, as it comes."""

    def forward(self, embeddings, *given, **named):
        """The loss of embeddings (N, D) with labels, pairs or triplets, and references."""
        loss = super().forward(embeddings, *given, **named)
        if not isinstance(loss, torch.Tensor):
            return loss
        kind = next(k for k in type(self).__mro__ if k.__module__.startswith(_PACKAGE))

        def call():
            # From 26 rows on torch has Euclidean distances of bfloat16.
            few = embeddings.detach().new_ones(26, embeddings.shape[1])
            classes = torch.arange(26, device=few.device) % 2
            options = {"distance": copy.copy(self.distance), "reducer": copy.deepcopy(self.reducer)}
            return kind(**options, **self.small_options(few.shape[1]))(few, classes)

        # Of several reducers the sum has the dtype of the embeddings.
        owner = kind, type(self.distance), *map(type, self.reducer.modules())
        return as_theirs(loss, owner, call, embeddings)

    def small_options(self, width):
        """What their class wants further for a loss of few rows (M, width) of two classes."""
        return {}
