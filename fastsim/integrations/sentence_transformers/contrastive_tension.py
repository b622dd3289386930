"""ContrastiveTensionLossInBatchNegatives: two encoders' embeddings of the same texts, as InfoNCE.

Carlsson et al. 2021, "Semantic Re-tuning with Contrastive Tension", with in-batch negatives: the
symmetric loss. The scale is exp(logit_scale), a number that is learnt.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.dtypes import function_key, in_one_dtype, in_their_dtype
from fastsim.integrations.overrides import is_plain, no_fused_form, replaced
from fastsim.integrations.sentence_transformers.fused import (
    CROSS_ENTROPY,
    SIMILARITIES,
    Replacement,
    lookup,
)
from fastsim.losses import info_nce
from fastsim.reduce import inverse


class ContrastiveTensionLossInBatchNegatives(
    Replacement, theirs.ContrastiveTensionLossInBatchNegatives
):
    """Contrastive tension with in-batch negatives; arguments as sentence-transformers' loss.

    `similarity_fct`: the cosine and `dot_score` have a fused form.
    """

    def forward(self, sentence_features, labels):
        """The loss of one tokenized column, which both encoders get; labels are ignored."""
        if self.is_unfused():
            return super().forward(sentence_features, labels)
        (features, *_) = sentence_features
        columns = [model(features)["sentence_embedding"] for model in (self.model1, self.model2)]
        if not len(columns[0]):
            return self._from_scores(*columns)  # NaN, as theirs
        queries, candidates = in_one_dtype(*columns)
        loss = info_nce(
            queries,
            candidates,
            temperature=inverse(self.logit_scale.exp(), queries),
            symmetric=True,
            similarity=SIMILARITIES[self.similarity_fct],
        )

        def theirs_on_two_rows():
            return self._from_scores(*(column[:2] for column in columns))

        owner = type(self), function_key(self.similarity_fct)
        return in_their_dtype(loss, owner, theirs_on_two_rows, *columns)

    def unfused_reason(self, *inputs):
        if lookup(SIMILARITIES, self.similarity_fct) is None:
            return no_fused_form("similarity_fct")
        if not is_plain(self.cross_entropy_loss, CROSS_ENTROPY):
            return replaced("cross_entropy_loss")
        return super().unfused_reason(*inputs)

    def _from_scores(self, queries, candidates):
        """The loss by way of the score matrix, as sentence-transformers computes it."""
        scores = self.similarity_fct(queries, candidates) * self.logit_scale.exp()
        labels = torch.arange(len(scores), device=scores.device)
        return sum(self.cross_entropy_loss(each, labels) for each in (scores, scores.T)) / 2
