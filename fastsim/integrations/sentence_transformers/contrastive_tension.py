"""ContrastiveTensionLossInBatchNegatives: two encoders' embeddings of the same texts, as InfoNCE.

Carlsson et al. 2021, "Semantic Re-tuning with Contrastive Tension", with in-batch negatives: the
symmetric loss. The scale is exp(logit_scale), a number that is learnt.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import is_plain
from fastsim.integrations.sentence_transformers.fused import (
    CROSS_ENTROPY,
    SIMILARITIES,
    Replacement,
    of_theirs,
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
        """The loss of one tokenized column, which both encoders see; labels are ignored."""
        option = self.unfused_option()
        if option is not None:
            self.say_unfused(option, stacklevel=4)
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

        def few():
            return self._from_scores(*(column[:2] for column in columns))

        return as_theirs(loss, (type(self), code_of(self.similarity_fct)), few, *columns)

    def unfused_option(self):
        if of_theirs(SIMILARITIES, self.similarity_fct) is None:
            return "similarity_fct"
        if not is_plain(self.cross_entropy_loss, CROSS_ENTROPY):
            return "cross_entropy_loss"
        return super().unfused_option()

    def _from_scores(self, queries, candidates):
        """The loss by all scores, as theirs."""
        scores = self.similarity_fct(queries, candidates) * self.logit_scale.exp()
        labels = torch.arange(len(scores), device=scores.device)
        return sum(self.cross_entropy_loss(each, labels) for each in (scores, scores.T)) / 2
