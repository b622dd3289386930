"""MultipleNegativesRankingLoss and its cached form: a softmax over up to four score matrices.

    L_i = log(sum_directions sum_j exp(z_ij)) - z_{i, positive},   z = scale cos (+ alpha sg(cos))

    query_to_doc q_i . d_j   query_to_query q_i . q_j, j != i
    doc_to_query d_i . q_j   doc_to_doc     d_i . d_j, j not of the same query

sg: stop gradient. Hardness adds alpha sg(cos) to some negatives (Lan et al. 2025, equation 5;
Schechter Vera et al. 2025). The scores of a row with its own documents are a few plain vectors;
those with all others are log-sum-exps of the engine. Hardness of in-batch negatives is therefore a
larger scale, with a gradient scaled down to that of the original scale.
"""

import warnings

import torch
from sentence_transformers.sentence_transformer import losses as theirs
from typing_extensions import deprecated

from fastsim.autocast import in_autocast, joined, without_autocast
from fastsim.backends import pick
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.integrations.overrides import no_fused_form
from fastsim.integrations.sentence_transformers.fused import (
    SIMILARITIES,
    Fused,
    LearntInCache,
    check_columns,
    gathering,
    lookup,
)
from fastsim.losses import info_nce
from fastsim.precision import compute_dtype, widened
from fastsim.reduce import inverse
from fastsim.scores import paired_cosine_similarity, unit_rows

BOTH = {"query_to_doc", "doc_to_query"}
SMALL = 1 << 16  # scores; up to here the matrix costs less than the calls that avoid it


class _Ranking(Fused):
    """What both share. Dot products have a fused form if `info_nce` is the whole loss."""

    def unfused_reason(self, *inputs):
        similarity = lookup(SIMILARITIES, self.similarity_fct)
        if similarity == "cosine" or (similarity == "dot" and _is_info_nce(self)):
            return super().unfused_reason(*inputs)
        return no_fused_form("similarity_fct")


class MultipleNegativesRankingLoss(_Ranking, theirs.MultipleNegativesRankingLoss):
    """InfoNCE with in-batch and hard negatives; arguments as sentence-transformers' loss.

    scale may be a Parameter. `similarity_fct`: the cosine has a fused form. `dot_score` has one
    without hardness, for the direction query_to_doc, or on one device for query_to_doc and
    doc_to_query with a softmax each.
    """

    gathered = gathering(theirs.MultipleNegativesRankingLoss)

    def fused(self, embeddings, labels):
        check_columns(embeddings)
        return _ranking(self, embeddings, self.scale)


class CachedMultipleNegativesRankingLoss(
    LearntInCache, _Ranking, theirs.CachedMultipleNegativesRankingLoss
):
    """The ranking loss with embeddings made in mini-batches (GradCache).

    Arguments as sentence-transformers' loss; scale and similarity_fct as for the loss without
    cache. The loss stage is a single call.
    """

    learnt = "scale"
    gathered = gathering(theirs.CachedMultipleNegativesRankingLoss)

    def calculate_loss(self, reps, labels=None, *, with_backward=False):
        """The loss of columns given as lists of mini-batches; detached if with_backward."""
        theirs = super().calculate_loss
        embeddings = [joined(column) for column in reps]
        if self.needs_theirs(embeddings):
            return theirs(reps, labels, with_backward=with_backward)
        check_columns(embeddings)
        columns = in_one_dtype(*embeddings)
        loss = self.loss_stage(with_backward, lambda scale: _ranking(self, columns, scale))
        return self.in_their_dtype(loss, lambda *rows: theirs([[row] for row in rows]), embeddings)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # that there is a subclass of them

    @deprecated(theirs.MultipleNegativesSymmetricRankingLoss.__deprecated__)
    class MultipleNegativesSymmetricRankingLoss(
        theirs.MultipleNegativesSymmetricRankingLoss, MultipleNegativesRankingLoss
    ):
        """MultipleNegativesRankingLoss in both directions; arguments as there."""

    @deprecated(theirs.CachedMultipleNegativesSymmetricRankingLoss.__deprecated__)
    class CachedMultipleNegativesSymmetricRankingLoss(
        theirs.CachedMultipleNegativesSymmetricRankingLoss, CachedMultipleNegativesRankingLoss
    ):
        """CachedMultipleNegativesRankingLoss in both directions; arguments as there."""


def _is_info_nce(options):
    """Whether the loss is `info_nce`, one-sided or symmetric, for any number of columns."""
    if options.hardness_mode is not None and options.hardness_strength > 0:
        return False
    if set(options.directions) == BOTH:
        return options.partition_mode != "joint" and not options.gather_across_devices
    return set(options.directions) == {"query_to_doc"}


def _ranking(options, embeddings, scale):
    queries, *docs = embeddings
    batch = len(queries)
    gathered, offset = [queries, *docs], 0
    if options.gather_across_devices:
        gathered, rank = options.gathered(gathered)
        offset = rank * batch
    alpha = _hardness(options, len(docs))
    directions = set(options.directions)
    joint = options.partition_mode == "joint"
    one_rank = len(gathered[0]) == batch
    if not any(alpha):
        symmetric = directions == BOTH and not joint and one_rank
        if symmetric or directions == {"query_to_doc"}:
            positives = torch.arange(offset, offset + batch, device=queries.device)
            return info_nce(
                queries,
                joined(gathered[1:]),
                positives,
                temperature=inverse(scale, queries),
                symmetric=symmetric,
                similarity=SIMILARITIES[options.similarity_fct],
            )
    if one_rank and 2 * batch * batch * len(embeddings) <= SMALL:
        positive, parts = _from_matrix(embeddings, scale, alpha, directions)
    else:
        positive, parts = _by_direction(queries, docs, gathered, offset, scale, alpha, directions)
    if joint:
        lse = torch.logsumexp(torch.cat(parts), 0)
    else:
        lse = sum(torch.logsumexp(part, 0) for part in parts) / len(parts)
    return (lse - positive).mean().to(compute_dtype(queries))


def _hardness(options, columns):
    """(alpha of in-batch negatives, alpha of the hard negatives of the row itself)."""
    alpha, mode = options.hardness_strength, options.hardness_mode
    in_batch = alpha if mode in ("in_batch_negatives", "all_negatives") else 0.0
    hard = alpha if mode in ("hard_negatives", "all_negatives") and columns > 1 else 0.0
    return in_batch, hard


def _from_matrix(embeddings, scale, alpha, directions):
    """As `_by_direction`, from the score matrix of a small batch, which takes fewer calls."""
    batch, columns = len(embeddings[0]), len(embeddings)
    both = bool({"doc_to_query", "doc_to_doc"} & directions)
    units = unit_rows(joined(embeddings), pick(None, embeddings[0]))
    with without_autocast(units.device.type):
        scores = units[: batch * (1 + both)] @ units.T
    # (1 or 2, N, columns, N): queries and perhaps positives, their row; the other column, its row.
    scores = scores.view(-1, batch, columns, batch)
    logits = scale * scores
    same_row = torch.eye(batch, dtype=torch.bool, device=scores.device)
    in_batch_alpha, hard_alpha = alpha
    if in_batch_alpha or hard_alpha:
        harder = torch.where(same_row, hard_alpha, in_batch_alpha)
        harder = harder[:, None].repeat(1, columns - 1, 1)
        harder[:, 0].masked_fill_(same_row, 0.0)
        harder = torch.nn.functional.pad(harder, (0, 0, 1, 0))
        logits = torch.cat([logits[:1] + harder * scores[:1].detach(), logits[1:]])
    positive = logits[0, :, 1].diagonal()
    parts = [logits[0, :, 1:]]
    if "query_to_query" in directions:
        parts.append(logits[0, :, :1].masked_fill(same_row[:, None], -torch.inf))
    if "doc_to_query" in directions:
        parts.append(logits[1, :, :1])
    if "doc_to_doc" in directions:
        parts.append(logits[1, :, 1:].masked_fill(same_row[:, None], -torch.inf))
    return positive, [part.flatten(1).T for part in parts]


def _by_direction(queries, docs, gathered, offset, scale, alpha, directions):
    """(logits (N,) of the positives, per direction its logits or log-sum-exps (terms, N))."""
    queries, *rest = in_autocast(queries, *docs, *gathered)
    docs, gathered = rest[: len(docs)], rest[len(docs) :]
    all_queries, all_docs = gathered[0], joined(gathered[1:])
    one_rank = len(all_queries) == len(queries)
    all_ids = torch.arange(len(all_queries), device=queries.device)
    ids, doc_ids = all_ids[offset : offset + len(queries)], all_ids.repeat(len(docs))
    in_batch_alpha, hard_alpha = alpha

    cosines = (widened(paired_cosine_similarity(queries, column)) for column in docs)
    positive, *hard = cosines
    positive = scale * positive
    terms = [positive, *(scale * cosine + hard_alpha * cosine.detach() for cosine in hard)]

    # One pass gives both query_to_doc and doc_to_query if they share their logits.
    shared = "doc_to_query" in directions and one_rank and not in_batch_alpha
    sides = queries, all_docs
    if in_batch_alpha:
        plain_scale = torch.as_tensor(scale, dtype=compute_dtype(queries)).detach()
        factor = plain_scale / (plain_scale + in_batch_alpha)
        sides = (_ScaledGradient.apply(side, factor) for side in sides)
    others = log_sum_exp(
        *sides, scale=scale + in_batch_alpha, exclude=(ids, doc_ids), columns=shared
    )
    others, columns = others if shared else (others, None)
    parts = [torch.stack([others, *terms])]
    if "query_to_query" in directions:
        keys = None if one_rank else all_queries
        parts.append(log_sum_exp(queries, keys, scale=scale, exclude=(ids, all_ids))[None])
    if shared:
        parts.append(torch.stack([columns[: len(queries)], positive]))
    elif "doc_to_query" in directions:
        parts.append(log_sum_exp(docs[0], all_queries, scale=scale)[None])
    if "doc_to_doc" in directions:
        parts.append(log_sum_exp(docs[0], all_docs, scale=scale, exclude=(ids, doc_ids))[None])
    return positive, parts


class _ScaledGradient(torch.autograd.Function):
    """x, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.save_for_backward(number)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].to(grad), None
