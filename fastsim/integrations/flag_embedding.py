"""FlagEmbedding's in-batch loss without the score matrix: replace two methods of its model.

    from fastsim.integrations.flag_embedding import cross_device_loss, in_batch_loss
    BiEncoderOnlyEmbedderModel._compute_in_batch_neg_loss = in_batch_loss
    BiEncoderOnlyEmbedderModel._compute_cross_device_neg_loss = cross_device_loss

The last line is needed with `negatives_cross_device`. For version 1.4, whose encoder-only and
decoder-only models score by dot products over a temperature. Models that score in another way, such
as M3, keep their own methods. If a method that scores or the cross entropy has been replaced,
FlagEmbedding's code computes the loss, and a warning says so once.
"""

import torch
from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

from fastsim.integrations.dtypes import in_one_dtype, in_their_dtype
from fastsim.integrations.overrides import is_plain, no_fused_form, replaced, warn_once
from fastsim.integrations.products import cross_entropy
from fastsim.reduce import inverse

_theirs = AbsEmbedderModel._compute_in_batch_neg_loss
_theirs_across = AbsEmbedderModel._compute_cross_device_neg_loss
_CROSS_ENTROPY = torch.nn.CrossEntropyLoss()
_METHODS = "compute_score", "_compute_similarity", "compute_loss"
# The modules of the models whose methods the fused form stands for.
_SHIPPED = tuple(
    f"FlagEmbedding.finetune.embedder.{kind}.modeling"
    for kind in ("encoder_only.base", "decoder_only.base", "decoder_only.icl")
)


def in_batch_loss(model, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **options):
    """(None, loss) of queries (N, D) and passages (N G, D): G per query, the positive first.

    The scores are None, as their training step does not read them. With teacher targets or another
    score function, FlagEmbedding's code computes the loss.
    """
    if teacher_targets is not None or compute_score_func is not None:
        return _theirs(model, q_reps, p_reps, teacher_targets, compute_score_func, **options)
    return _in_batch(model, q_reps, p_reps)


def cross_device_loss(
    model, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **options
):
    """`in_batch_loss` of the queries and passages of all devices, gathered by their code."""
    if teacher_targets is not None or compute_score_func is not None:
        return _theirs_across(model, q_reps, p_reps, teacher_targets, compute_score_func, **options)
    return _in_batch(model, *(model._dist_gather_tensor(reps) for reps in (q_reps, p_reps)))


def _in_batch(model, q_reps, p_reps):
    reason = _unfused_reason(model)
    if reason is not None:
        warn_once(model, reason, "FlagEmbedding")
        return _theirs(model, q_reps, p_reps)
    group = len(p_reps) // len(q_reps)
    positives = torch.arange(len(q_reps), device=q_reps.device) * group
    names = "q_reps", "p_reps", "positives"
    sides = in_one_dtype(q_reps, p_reps)
    scale = inverse(model.temperature, sides[0])
    loss = cross_entropy(*sides, positives, scale, names=names)

    def theirs():
        return _theirs(model, q_reps.detach()[:1], p_reps.detach()[:1])[1]

    return None, in_their_dtype(loss, type(model), theirs, q_reps, p_reps, model.temperature)


def _unfused_reason(model):
    """Why the loss of a model is not fused, or None."""
    for name in _METHODS:
        method = getattr(type(model), name)
        if name in vars(model) or getattr(method, "__module__", None) not in _SHIPPED:
            return replaced(name)
    if not is_plain(model.cross_entropy, _CROSS_ENTROPY):
        return replaced("cross_entropy")
    return None if model.temperature > 0 else no_fused_form("temperature")
