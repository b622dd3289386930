"""GISTEmbedLoss and its cached form: InfoNCE whose false negatives a guide model leaves out.

    L_i = log sum_{j in kept} exp(cos_ij / temperature) - cos_{i, positive} / temperature

over anchor-positive, anchor-anchor, positive-positive and anchor-negative scores; a pair is kept
unless its cosine by the guide is above t_i - margin ("absolute") or t_i - |t_i| margin
("relative"), t_i the guide's cosine of row i's own pair, which is always kept.

Source: Solatorio 2024, "GISTEmbed". The guide's scores are made beside the loss's, a panel at a
time, and gone with it.
"""

import types
from itertools import pairwise

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.util import batch_to_device

from fastsim.backends import pick
from fastsim.backends.extras import GUIDE, UNTARGETED
from fastsim.engine.log_sum_exp import guide_beside, guide_cosines, log_sum_exp
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.integrations.overrides import is_plain
from fastsim.integrations.sentence_transformers.fused import (
    CROSS_ENTROPY,
    Fused,
    LearntInCache,
    check_columns,
    gathering,
)
from fastsim.precision import widened
from fastsim.reduce import inverse
from fastsim.scores import compute_dtype, paired_cosine_similarity

_their_forward = theirs.GISTEmbedLoss.forward
_COSINE = torch.nn.CosineSimilarity(dim=-1)
# What their forward pass reads beside models and methods. Not their `get_config_dict`, which a
# subclass may have return anything.
_OPTIONS = ("temperature", "margin_strategy", "margin", "contrast_anchors", "contrast_positives")
_OPTIONS += ("gather_across_devices",)


class _Guided(Fused):
    """The two of them; their matrices and the softmax over those are hooks of theirs."""

    def unfused_option(self):
        if not is_plain(self.similarity_fct, _COSINE):
            return "similarity_fct"
        if not is_plain(self.cross_entropy_loss, CROSS_ENTROPY):
            return "cross_entropy_loss"
        return super().unfused_option()


class GISTEmbedLoss(_Guided, theirs.GISTEmbedLoss, hooks=("sim_matrix",)):
    """Guided InfoNCE; arguments as sentence-transformers' loss, temperature may be a Parameter."""

    gathered = gathering(theirs.GISTEmbedLoss)

    def forward(self, sentence_features, labels):
        """The loss of two or three tokenized columns."""
        sentence_features = list(sentence_features)
        option = self.unfused_option()
        if option is not None:
            self.say_unfused(option, stacklevel=4)
            return super().forward(sentence_features, labels)
        # The guide gets its own dicts: a model writes what it makes into those it is given.
        copies = [dict(feature) for feature in sentence_features]
        embeddings = embed_columns(self.model, sentence_features)
        with torch.no_grad():
            if self.must_retokenize:
                copies = [self._retokenized(feature) for feature in sentence_features]
            guides = embed_columns(self.guide, copies)
        return self.compute_loss_from_embeddings(embeddings, labels, guides)

    def compute_loss_from_embeddings(self, embeddings, labels=None, guide_embeddings=None):
        """The loss of the columns [anchors, positives[, negatives]] and the guide's of the same."""
        if guide_embeddings is None:
            raise ValueError("guide_embeddings: wanted the guide's embeddings of the same columns")
        if self.is_theirs(embeddings):
            return self._theirs(*embeddings, guides=guide_embeddings)
        check_columns(embeddings, most=3)
        loss = _gist(self, embeddings, guide_embeddings, self.temperature)
        return self.in_their_dtype(loss, self._theirs, embeddings)

    def _theirs(self, *embeddings, guides=None):
        """Their loss of embeddings at hand; without guides they are the embeddings."""
        columns = [{"sentence_embedding": column} for column in embeddings]
        guides = iter(embeddings if guides is None else guides)
        given = types.SimpleNamespace(
            **{name: getattr(self, name) for name in _OPTIONS},
            sim_matrix=self.sim_matrix,
            cross_entropy_loss=self.cross_entropy_loss,
            must_retokenize=False,
            model=lambda feature: feature,
        )
        given.guide = lambda feature: {"sentence_embedding": next(guides)}
        return _their_forward(given, columns, None)

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
    """The same with embeddings made in mini-batches (GradCache) and any number of negatives.

    Arguments as sentence-transformers' loss, temperature may be a Parameter; the loss stage is one
    call.
    """

    learnt = "temperature"
    gathered = gathering(theirs.CachedGISTEmbedLoss)

    def calculate_loss(self, reps, reps_guided, *, with_backward=False):
        """The loss of columns and guide columns given as lists of mini-batches."""
        theirs = super().calculate_loss
        if len(reps) != len(reps_guided):
            raise ValueError("reps and reps_guided must have the same length")
        embeddings, guides = ([torch.cat(c) for c in columns] for columns in (reps, reps_guided))
        if self.is_theirs(embeddings):
            return theirs(reps, reps_guided, with_backward=with_backward)
        check_columns(embeddings)
        loss = self.loss_stage(
            with_backward, lambda temperature: _gist(self, embeddings, guides, temperature)
        )

        def few(*rows):
            return theirs([[row] for row in rows], [[guide[:2]] for guide in guides])

        return self.in_their_dtype(loss, few, embeddings)


def _gist(options, embeddings, guides, temperature):
    check_columns(guides, fewest=len(embeddings), most=len(embeddings))
    embeddings = in_one_dtype(*embeddings)
    guides = guide_beside(embeddings[0], *in_one_dtype(*guides))
    (anchors, positives, *_), (anchor_guides, positive_guides, *_) = embeddings, guides
    candidates, candidate_guides, offset = embeddings[1:], guides[1:], 0
    if options.gather_across_devices:
        candidates, rank = options.gathered(candidates)
        candidate_guides, _ = options.gathered(candidate_guides)
        offset = rank * len(anchors)
    scale, extras = inverse(temperature, anchors), (UNTARGETED, GUIDE)
    # One for all: a copy of the positive ties with it by the products of the same backend alone.
    asked = anchors, *candidates, scale, *guides
    backend = pick(None, *asked, kind="softmax", extras=extras).name
    own = guide_cosines(anchor_guides, positive_guides, backend=backend)
    slack = own.abs() if options.margin_strategy == "relative" else 1.0
    thresholds = own - slack * options.margin

    everyone = torch.arange(len(candidates[0]), device=anchors.device)
    ids = torch.full((len(candidates) * len(everyone),), -1, device=anchors.device)
    ids[: len(everyone)] = everyone

    def terms(x, y, guide_x, guide_y, exclude=None):
        guide = guide_x, guide_y, thresholds
        return log_sum_exp(x, y, scale=scale, exclude=exclude, guide=guide, backend=backend)

    positive = scale * widened(paired_cosine_similarity(anchors, positives))
    exclude = everyone[offset : offset + len(anchors)], ids
    sides = torch.cat(candidates), anchor_guides, torch.cat(candidate_guides)
    parts = [positive, terms(anchors, *sides, exclude=exclude)]
    if options.contrast_anchors:
        parts.append(terms(anchors, None, anchor_guides, anchor_guides))
    if options.contrast_positives:
        alone = len(everyone) == len(anchors)
        keys = None if alone else candidates[0]
        key_guides = positive_guides if alone else candidate_guides[0]
        parts.append(terms(positives, keys, positive_guides, key_guides))
    loss = (torch.logsumexp(torch.stack(parts), 0) - positive).mean()
    return loss.to(compute_dtype(embeddings[0]))
