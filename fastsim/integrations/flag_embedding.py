"""FlagEmbedding's in-batch loss without the score matrix: two lines beside what is there.

    from fastsim.integrations.flag_embedding import in_batch_loss
    BiEncoderOnlyEmbedderModel._compute_in_batch_neg_loss = in_batch_loss

Of version 1.4, whose encoder-only and decoder-only models score by products over a temperature. A
model that scores otherwise is not served: M3's sum of several scores keeps its own method.
"""

import torch
from FlagEmbedding.abc.finetune.embedder.AbsModeling import AbsEmbedderModel

from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.products import cross_entropy

_theirs = AbsEmbedderModel._compute_in_batch_neg_loss


def in_batch_loss(model, q_reps, p_reps, teacher_targets=None, compute_score_func=None, **options):
    """(None, loss) of queries (N, D) and passages (N G, D), G of each query, the first its own.

    None stands for the scores, which their training step does not read. With a teacher's scores or
    scores of another kind the answer is theirs, by their code.
    """
    if teacher_targets is not None or compute_score_func is not None:
        return _theirs(model, q_reps, p_reps, teacher_targets, compute_score_func, **options)
    group = len(p_reps) // len(q_reps)
    positives = torch.arange(len(q_reps), device=q_reps.device) * group
    loss = cross_entropy(q_reps, p_reps, positives, 1 / model.temperature)

    def few():
        return _theirs(model, q_reps.detach()[:1], p_reps.detach()[:1])[1]

    return None, as_theirs(loss, type(model), few, q_reps, p_reps)
