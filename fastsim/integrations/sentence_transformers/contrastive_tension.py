"""ContrastiveTensionLossInBatchNegatives: two encoders' embeddings of the same texts, as InfoNCE.

Carlsson et al. 2021, "Semantic Re-tuning with Contrastive Tension", with in-batch negatives: the
symmetric loss. The scale is exp(logit_scale), a number that is learnt.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.util import dot_score

from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import Hooked, is_plain, say_once
from fastsim.integrations.sentence_transformers.ranking import COSINES
from fastsim.integrations.sentence_transformers.their_module import InTheirModule
from fastsim.losses import info_nce
from fastsim.reduce import inverse


class ContrastiveTensionLossInBatchNegatives(
    InTheirModule, Hooked, theirs.ContrastiveTensionLossInBatchNegatives, hooks=()
):
    """Contrastive tension with in-batch negatives; arguments as sentence-transformers' loss.

    `similarity_fct`: the cosine and `dot_score` have a fused form.
    """

    def forward(self, sentence_features, labels):
        """The loss of one tokenized column, which both encoders see; labels are ignored."""
        option = self._unfused_option()
        if option is not None:
            say_once(self, f"{option} has no fused form", "sentence-transformers", stacklevel=3)
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
            similarity="cosine" if self.similarity_fct in COSINES else "dot",
        )
        owner = type(self), code_of(self.similarity_fct)
        few = [column.detach()[:2] for column in columns]
        return as_theirs(loss, owner, lambda: self._from_scores(*few), *columns)

    def _unfused_option(self):
        if self.similarity_fct not in COSINES and self.similarity_fct is not dot_score:
            return "similarity_fct"
        if not is_plain(self.cross_entropy_loss, torch.nn.CrossEntropyLoss()):
            return "cross_entropy_loss"
        return self.replaced_hook()

    def _from_scores(self, queries, candidates):
        """The loss by all scores, as theirs."""
        scores = self.similarity_fct(queries, candidates) * self.logit_scale.exp()
        labels = torch.arange(len(scores), device=scores.device)
        return sum(self.cross_entropy_loss(each, labels) for each in (scores, scores.T)) / 2
