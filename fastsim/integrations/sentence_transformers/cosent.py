"""CoSENTLoss and AnglELoss: a sort and two scans over the scores of the batch (fastsim.cosent)."""

from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.util import pairwise_angle_sim, pairwise_cos_sim
from torch.nn.functional import pad

from fastsim.checks import check_number
from fastsim.integrations.overrides import no_fused_form
from fastsim.integrations.sentence_transformers.fused import (
    Fused,
    check_columns,
    check_labels,
    lookup,
)
from fastsim.losses import angle_similarity, cosent
from fastsim.scores import paired_cosine_similarity


def _angles(u, v):
    odd = u.shape[1] % 2
    return angle_similarity(pad(u, (0, odd)), pad(v, (0, odd)))


FUSED = {pairwise_cos_sim: paired_cosine_similarity, pairwise_angle_sim: _angles}


class CoSENTLoss(Fused, theirs.CoSENTLoss):
    """CoSENT; arguments as sentence-transformers' loss, scale may be a Parameter.

    `similarity_fct` may be any function: the loss needs only its N scores. Columns after the second
    are ignored. A scale that is not a positive number has no fused form.
    """

    def unfused_reason(self, *inputs):
        try:
            check_number("scale", self.scale, positive=True)
        except (TypeError, ValueError):  # theirs accepts any factor
            return no_fused_form("scale")
        return super().unfused_reason(*inputs)

    def fused(self, embeddings, labels):
        embeddings = embeddings[:2]
        check_columns(embeddings)
        labels = check_labels(self, labels, len(embeddings[0]))
        scores = lookup(FUSED, self.similarity_fct, self.similarity_fct)(*embeddings)
        if labels.shape != scores.shape:
            raise ValueError(
                "Labels and scores must have the same shape,"
                f" got {tuple(labels.shape)} and {tuple(scores.shape)}."
            )
        return cosent(scores, labels, scale=self.scale)


class AnglELoss(theirs.AnglELoss, CoSENTLoss):
    """CoSENT on angle scores; arguments as sentence-transformers' loss.

    Their code turns tuples into pairs, and CoSENTLoss computes the loss of these.
    """

    get_config_dict = CoSENTLoss.get_config_dict
