"""GlobalOrthogonalRegularizationLoss: the moments of all cosines of a column, without the cosines.

    M_1 = sum_{i != j} x_i . x_j / (N (N - 1))          loss: M_1^2
    M_2 = sum_{i != j} (x_i . x_j)^2 / (N (N - 1))      loss: relu(M_2 - 1 / D)

Zhang et al. 2017, "Learning Spread-out Local Feature Descriptors", for unit rows x_i of D numbers.
Over all pairs the sums are |sum_i x_i|^2 and |sum_i x_i x_i^T|^2, where the last matrix is D x D.
That is the way of a batch of more rows than dimensions; of others the N x N cosines are fewer.
"""

from functools import partial

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.autocast import without_autocast
from fastsim.backends import pick
from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.sentence_transformers.fused import SIMILARITIES, Replacement, of_theirs
from fastsim.scores import unit_rows


class GlobalOrthogonalRegularizationLoss(Replacement, theirs.GlobalOrthogonalRegularizationLoss):
    """Spread-out regularization; arguments as sentence-transformers' loss.

    `similarity_fct`: the cosine has a fused form.
    """

    def compute_gor(self, embeddings):
        """The terms of one column (N, D), of its first and its second moment -> two scalars."""
        theirs = super().compute_gor
        option = self.unfused_option()
        if option is not None:
            self.say_unfused(option, stacklevel=6)
            return theirs(embeddings)
        first, second = _moments(embeddings)
        terms = first.square(), torch.relu(second - 1 / embeddings.shape[1])

        def few(place):
            return theirs(embeddings[:2])[place]

        return tuple(
            as_theirs(term, (type(self), place), partial(few, place), embeddings)
            for place, term in enumerate(terms)
        )

    def unfused_option(self):
        served = of_theirs(SIMILARITIES, self.similarity_fct) == "cosine"
        return super().unfused_option() if served else "similarity_fct"


def _moments(rows):
    """(M_1, M_2) of rows (N, D); 0 of fewer than two."""
    count, width = rows.shape
    with without_autocast(rows.device.type):
        units = unit_rows(rows, pick(None, rows))
        if count <= width:
            cosines = (units @ units.T).fill_diagonal_(0.0)
            sums = cosines.sum(), cosines.square().sum()
        else:
            own, total = units.square().sum(1), units.sum(0)
            gram = units.T @ units
            sums = total @ total - own.sum(), gram.square().sum() - own.square().sum()
    return [each / max(count * (count - 1), 1) for each in sums]
