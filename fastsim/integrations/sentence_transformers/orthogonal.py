"""GlobalOrthogonalRegularizationLoss: the moments of all cosines of a column, without the cosines.

    M_1 = sum_{i != j} x_i . x_j / (N (N - 1))          loss: M_1^2
    M_2 = sum_{i != j} (x_i . x_j)^2 / (N (N - 1))      loss: relu(M_2 - 1 / D)

Zhang et al. 2017, "Learning Spread-out Local Feature Descriptors", for unit rows x_i of D numbers.
Over all pairs, i = j included, the sums are |sum_i x_i|^2 and |sum_i x_i x_i^T|^2, with a D x D
matrix. A batch of no more rows than dimensions uses the N x N cosines instead, which are fewer.
"""

from functools import partial

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.autocast import without_autocast
from fastsim.backends import pick
from fastsim.integrations.dtypes import in_their_dtype
from fastsim.integrations.overrides import no_fused_form
from fastsim.integrations.sentence_transformers.fused import SIMILARITIES, Replacement, lookup
from fastsim.scores import unit_rows


class GlobalOrthogonalRegularizationLoss(Replacement, theirs.GlobalOrthogonalRegularizationLoss):
    """Spread-out regularization; arguments as sentence-transformers' loss.

    `similarity_fct`: the cosine has a fused form.
    """

    def compute_gor(self, embeddings):
        """The terms of the first and of the second moment of a column (N, D) -> two scalars."""
        theirs = super().compute_gor
        if self.is_unfused():
            return theirs(embeddings)
        first, second = _moments(embeddings)
        terms = first.square(), torch.relu(second - 1 / embeddings.shape[1])

        def theirs_on_two_rows(index):
            return theirs(embeddings[:2])[index]

        return tuple(
            in_their_dtype(
                term, (type(self), index), partial(theirs_on_two_rows, index), embeddings
            )
            for index, term in enumerate(terms)
        )

    def unfused_reason(self, *inputs):
        if lookup(SIMILARITIES, self.similarity_fct) != "cosine":
            return no_fused_form("similarity_fct")
        return super().unfused_reason(*inputs)


def _moments(rows):
    """(M_1, M_2) of rows (N, D); 0 for fewer than two rows."""
    count, width = rows.shape
    with without_autocast(rows.device.type):
        units = unit_rows(rows, pick(None, rows))
        if count <= width:
            cosines = (units @ units.T).fill_diagonal_(0.0)
            sums = cosines.sum(), cosines.square().sum()
        else:
            squares, total = units.square().sum(1), units.sum(0)
            gram = units.T @ units
            sums = total @ total - squares.sum(), gram.square().sum() - squares.square().sum()
    return [each / max(count * (count - 1), 1) for each in sums]
