"""FlagEmbedding's in-batch loss without the score matrix: two lines beside what is there.

    from fastsim.integrations.flag_embedding import cross_device_loss, in_batch_loss
    BiEncoderOnlyEmbedderModel._compute_in_batch_neg_loss = in_batch_loss
    BiEncoderOnlyEmbedderModel._compute_cross_device_neg_loss = cross_device_loss

The third is for `negatives_cross_device`, with which their model calls that method. Of version 1.4,
whose encoder-only and decoder-only models score by products over a temperature. A model that scores
otherwise is not served: M3's sum of several scores keeps its own method. Where a method that scores
or the cross entropy was replaced, FlagEmbedding's code computes the loss, and a warning says so
once.
"""

import torch
from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

from fastsim.integrations.dtypes import as_theirs, in_one_dtype
from fastsim.integrations.overrides import is_plain, say_once
from fastsim.integrations.products import cross_entropy

_theirs = AbsEmbedderModel._compute_in_batch_neg_loss
_theirs_across = AbsEmbedderModel._compute_cross_device_neg_loss
_CROSS_ENTROPY = torch.nn.CrossEntropyLoss()
_METHODS = "compute_score", "_compute_similarity", "compute_loss"
# Where the models are whose methods these may be.
_SHIPPED = tuple(
    f"FlagEmbedding.finetune.embedder.{kind}.modeling"
    for kind in ("encoder_only.base", "decoder_only.base", "decoder_only.icl")
)


def in_batch_loss(model, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **options):
    """(None, loss) of queries (N, D) and passages (N G, D), G of each query, the first its own.

    None stands for the scores, which their training step does not read. With a teacher's scores or
    scores of another kind their code computes the loss.
    """
    if teacher_targets is not None or compute_score_func is not None:
        return _theirs(model, q_reps, p_reps, teacher_targets, compute_score_func, **options)
    return _in_batch(model, q_reps, p_reps)


def cross_device_loss(
    model, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **options
):
    """The same of the queries and passages of all devices, gathered by their code."""
    if teacher_targets is not None or compute_score_func is not None:
        given = teacher_targets, compute_score_func
        return _theirs_across(model, q_reps, p_reps, *given, **options)
    return _in_batch(model, *(model._dist_gather_tensor(reps) for reps in (q_reps, p_reps)))


def _in_batch(model, q_reps, p_reps):
    option = _unfused_option(model)
    if option is not None:
        say_once(model, f"{option} has no fused form", "FlagEmbedding", stacklevel=4)
        return _theirs(model, q_reps, p_reps)
    group = len(p_reps) // len(q_reps)
    positives = torch.arange(len(q_reps), device=q_reps.device) * group
    named = {"names": ("q_reps", "p_reps", "positives")}
    sides = in_one_dtype(q_reps, p_reps)
    loss = cross_entropy(*sides, positives, 1 / model.temperature, **named)

    def few():
        return _theirs(model, q_reps.detach()[:1], p_reps.detach()[:1])[1]

    return None, as_theirs(loss, type(model), few, q_reps, p_reps)


def _unfused_option(model):
    """What of the model has been replaced, or is a temperature without a softmax, or None."""
    for name in _METHODS:
        method = getattr(type(model), name)
        if name in vars(model) or getattr(method, "__module__", None) not in _SHIPPED:
            return name
    if not is_plain(model.cross_entropy, _CROSS_ENTROPY):
        return "cross_entropy"
    return None if model.temperature > 0 else "temperature"
