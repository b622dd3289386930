"""GISTEmbedLoss and its cached form: InfoNCE without the false negatives that a guide finds.

    L_i = log sum_{j in kept} exp(cos_ij / temperature) - cos_{i, positive} / temperature

over anchor-positive, anchor-anchor, positive-positive and anchor-negative scores. With t_i the
guide's cosine of anchor i and its positive, a pair is kept unless its cosine by the guide is above
t_i - margin ("absolute") or t_i - |t_i| margin ("relative"). The positive is always kept.

Source: Solatorio 2024, "GISTEmbed". The guide's scores are computed panel by panel with those of
the loss, and not stored.
"""

import types
from itertools import pairwise

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.util import batch_to_device

from fastsim.autocast import joined
from fastsim.backends import pick
from fastsim.backends.extras import GUIDE, UNTARGETED
from fastsim.engine.log_sum_exp import guide_beside, guide_cosines, log_sum_exp
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.integrations.overrides import is_plain, replaced
from fastsim.integrations.sentence_transformers.fused import (
    CROSS_ENTROPY,
    Fused,
    LearntInCache,
    check_columns,
    gathering,
)
from fastsim.precision import compute_dtype, widened
from fastsim.reduce import inverse
from fastsim.scores import paired_cosine_similarity

_their_forward = theirs.GISTEmbedLoss.forward
_COSINE = torch.nn.CosineSimilarity(dim=-1)
# The options that their forward pass reads. `get_config_dict` may return anything in a subclass.
_OPTIONS = ("temperature", "margin_strategy", "margin", "contrast_anchors", "contrast_positives")
_OPTIONS += ("gather_across_devices",)


class _Guided(Fused):
    """What both share: the modules that the fused form does not call."""

    def unfused_reason(self, *inputs):
        if not is_plain(self.similarity_fct, _COSINE):
            return replaced("similarity_fct")
        if not is_plain(self.cross_entropy_loss, CROSS_ENTROPY):
            return replaced("cross_entropy_loss")
        return super().unfused_reason(*inputs)


class GISTEmbedLoss(_Guided, theirs.GISTEmbedLoss, hooks=("sim_matrix",)):
    """Guided InfoNCE; arguments as sentence-transformers' loss, temperature may be a Parameter."""

    gathered = gathering(theirs.GISTEmbedLoss)

    def forward(self, sentence_features, labels):
        """The loss of two or three tokenized columns."""
        sentence_features = list(sentence_features)
        if self.is_unfused():
            return super().forward(sentence_features, labels)
        # The guide gets its own dictionaries, since a model writes its outputs into its input.
        copies = [dict(feature) for feature in sentence_features]
        embeddings = embed_columns(self.model, sentence_features)
        with torch.no_grad():
            if self.must_retokenize:
                copies = [self._retokenized(feature) for feature in sentence_features]
            guides = embed_columns(self.guide, copies)
        return self.compute_loss_from_embeddings(embeddings, labels, guides)

    def compute_loss_from_embeddings(self, embeddings, labels=None, guide_embeddings=None):
        """The loss of the columns [anchors, positives[, negatives]] and the guide's columns."""
        if guide_embeddings is None:
            raise ValueError(
                "guide_embeddings: wanted the guide's embeddings of the same columns, got None"
            )
        if self.needs_theirs(embeddings):
            return self._theirs(*embeddings, guides=guide_embeddings)
        check_columns(embeddings, most=3)
        loss = _gist(self, embeddings, guide_embeddings, self.temperature)
        return self.in_their_dtype(loss, self._theirs, embeddings)

    def _theirs(self, *embeddings, guides=None):
        """Their loss of given embeddings; guides: those of the guide, by default the same."""
        columns = [{"sentence_embedding": column} for column in embeddings]
        guides = iter(embeddings if guides is None else guides)
        stand_in = types.SimpleNamespace(
            **{name: getattr(self, name) for name in _OPTIONS},
            sim_matrix=self.sim_matrix,
            cross_entropy_loss=self.cross_entropy_loss,
            must_retokenize=False,
            model=lambda feature: feature,
        )
        stand_in.guide = lambda feature: {"sentence_embedding": next(guides)}
        return _their_forward(stand_in, columns, None)

    def _retokenized(self, feature):
        """The texts of a tokenized column, tokenized for the guide."""
        ids = feature["input_ids"]
        if "cu_seq_lens_q" in feature:
            ends = feature["cu_seq_lens_q"].tolist()
            ids = [ids[0, a:b].tolist() for a, b in pairwise(ends)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return batch_to_device(self.guide.preprocess(texts), self.guide.device)


class CachedGISTEmbedLoss(
    LearntInCache, _Guided, theirs.CachedGISTEmbedLoss, hooks=("sim_matrix",)
):
    """GISTEmbedLoss with embeddings made in mini-batches (GradCache) and any number of negatives.

    Arguments as sentence-transformers' loss, temperature may be a Parameter. The loss stage is a
    single call.
    """

    learnt = "temperature"
    gathered = gathering(theirs.CachedGISTEmbedLoss)

    def calculate_loss(self, reps, reps_guided, *, with_backward=False):
        """The loss of columns and guide columns given as lists of mini-batches."""
        theirs = super().calculate_loss
        if len(reps) != len(reps_guided):
            raise ValueError("reps and reps_guided must have the same length")
        embeddings, guides = ([joined(c) for c in columns] for columns in (reps, reps_guided))
        if self.needs_theirs(embeddings):
            return theirs(reps, reps_guided, with_backward=with_backward)
        check_columns(embeddings)
        loss = self.loss_stage(
            with_backward, lambda temperature: _gist(self, embeddings, guides, temperature)
        )

        def theirs_on_rows(*rows):
            return theirs([[row] for row in rows], [[guide[:2]] for guide in guides])

        return self.in_their_dtype(loss, theirs_on_rows, embeddings)


def _gist(options, embeddings, guides, temperature):
    check_columns(guides, least=len(embeddings), most=len(embeddings))
    embeddings = in_one_dtype(*embeddings)
    guides = guide_beside(embeddings[0], *in_one_dtype(*guides))
    (anchors, positives, *_), (anchor_guides, positive_guides, *_) = embeddings, guides
    candidates, candidate_guides, offset = embeddings[1:], guides[1:], 0
    if options.gather_across_devices:
        candidates, rank = options.gathered(candidates)
        candidate_guides, _ = options.gathered(candidate_guides)
        offset = rank * len(anchors)
    scale, extras = inverse(temperature, anchors), (UNTARGETED, GUIDE)
    # One backend for all products, so that a copy of the positive has exactly the same score.
    tensors = anchors, *candidates, scale, *guides
    backend = pick(None, *tensors, kind="softmax", extras=extras).name
    positive_cosines = guide_cosines(anchor_guides, positive_guides, backend=backend)
    slack = positive_cosines.abs() if options.margin_strategy == "relative" else 1.0
    thresholds = positive_cosines - slack * options.margin

    row_ids = torch.arange(len(candidates[0]), device=anchors.device)
    ids = torch.full((len(candidates) * len(row_ids),), -1, device=anchors.device)
    ids[: len(row_ids)] = row_ids

    def terms(x, y, guide_x, guide_y, exclude=None):
        guide = guide_x, guide_y, thresholds
        return log_sum_exp(x, y, scale=scale, exclude=exclude, guide=guide, backend=backend)

    positive = scale * widened(paired_cosine_similarity(anchors, positives))
    exclude = row_ids[offset : offset + len(anchors)], ids
    sides = joined(candidates), anchor_guides, joined(candidate_guides)
    parts = [positive, terms(anchors, *sides, exclude=exclude)]
    if options.contrast_anchors:
        parts.append(terms(anchors, None, anchor_guides, anchor_guides))
    if options.contrast_positives:
        one_rank = len(row_ids) == len(anchors)
        keys = None if one_rank else candidates[0]
        key_guides = positive_guides if one_rank else candidate_guides[0]
        parts.append(terms(positives, keys, positive_guides, key_guides))
    loss = (torch.logsumexp(torch.stack(parts), 0) - positive).mean()
    return loss.to(compute_dtype(embeddings[0]))
