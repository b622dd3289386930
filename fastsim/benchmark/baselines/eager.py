"""The losses as users write them in plain torch: the whole score matrix, then its loss."""

import math

import torch
from torch.nn import functional

from fastsim.benchmark.baselines.baseline import Baseline
from fastsim.benchmark.cases import prefixes


def cosines(x, y):
    return functional.normalize(x, dim=1) @ functional.normalize(y, dim=1).T


def diagonal(scores):
    return torch.arange(len(scores), device=scores.device)


def info_nce(x, y, temperature):
    logits = cosines(x, y) / temperature
    return functional.cross_entropy(logits, diagonal(logits))


def symmetric_info_nce(x, y, temperature, symmetric):
    logits = cosines(x, y) / temperature
    of_rows = functional.cross_entropy(logits, diagonal(logits))
    return (of_rows + functional.cross_entropy(logits.T, diagonal(logits))) / 2


def info_nce_directions(x, y, temperature, directions):
    assert directions == ("query_to_doc", "query_to_query", "doc_to_doc")
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    within = (cosines(side, side).masked_fill(eye, -torch.inf) for side in (x, y))
    logits = torch.cat([cosines(x, y), *within], 1) / temperature
    return functional.cross_entropy(logits, diagonal(logits))


def info_nce_own_negatives(x, y, own_negatives, temperature):
    further = torch.einsum(
        "nd,nkd->nk", functional.normalize(x, dim=1), functional.normalize(own_negatives, dim=2)
    )
    logits = torch.cat([cosines(x, y), further], 1) / temperature
    return functional.cross_entropy(logits, diagonal(logits))


def info_nce_references(x, y, references, temperature):
    further = cosines(x, references.to(x.dtype))
    logits = torch.cat([cosines(x, y), further], 1) / temperature
    return functional.cross_entropy(logits, diagonal(logits))


def guided_info_nce(x, y, guide_x, guide_y, temperature):
    logits, guide = cosines(x, y) / temperature, cosines(guide_x, guide_y)
    false = guide > guide.diagonal()[:, None]
    return functional.cross_entropy(logits.masked_fill(false, -torch.inf), diagonal(logits))


def smoothed_info_nce(x, y, temperature, label_smoothing):
    logits = cosines(x, y) / temperature
    return functional.cross_entropy(logits, diagonal(logits), label_smoothing=label_smoothing)


def biased_info_nce(x, y, bias, temperature):
    logits = cosines(x, y) / temperature + bias.to(x.dtype)
    return functional.cross_entropy(logits, diagonal(logits))


def info_nce_prefixes(x, y, temperature):
    return sum(info_nce(x[:, :d], y[:, :d], temperature) for d in prefixes(x.shape[1]))


def siglip(x, y, scale, bias):
    logits = cosines(x, y) * scale + bias
    signs = 2 * torch.eye(len(x), device=x.device, dtype=x.dtype) - 1
    return -functional.logsigmoid(signs * logits).sum() / len(x)


def grouped_siglip(x, y, groups, scale, bias):
    logits = cosines(x, y) * scale + bias
    return -functional.logsigmoid(signs(groups, x) * logits).sum() / len(x)


def weighed_siglip(x, y, groups, scale, bias, positive_weight):
    assert positive_weight == "both"
    logits = cosines(x, y) * scale + bias
    same = (groups[0][:, None] == groups[1]).to(x.dtype)
    per_row, per_column = (same.sum(axis, keepdim=True).clamp(min=1) for axis in (1, 0))
    weights = 1 - same + same * (1 / per_row + 1 / per_column) / 2
    return -(weights * functional.logsigmoid((2 * same - 1) * logits)).sum() / len(x)


def full_triplet(x, y, margin):
    scores = cosines(x, y)
    positive = scores.diagonal()
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    mean = (scores.sum(1) - positive) / (len(x) - 1)
    near = scores.masked_fill(eye | (scores > positive[:, None]), -2.0).max(1).values
    return (torch.relu(mean - positive + margin) + torch.relu(near - positive + margin)).mean()


def sup_con(x, groups, temperature):
    logits = cosines(x, x) / temperature
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    mates = (groups[:, None] == groups) & ~eye
    log_shares = logits - logits.masked_fill(eye, -torch.inf).logsumexp(1, keepdim=True)
    count = mates.sum(1)
    losses = -(log_shares * mates).sum(1) / count.clamp(min=1)
    return losses.sum() / (count > 0).sum()


def mates_and_others(groups):
    """(pairs of two rows of one group, pairs of rows of different groups), (N, N) each."""
    same = groups[:, None] == groups
    return same & ~torch.eye(len(groups), dtype=torch.bool, device=groups.device), ~same


def nt_xent(x, groups, temperature):
    mates, others = mates_and_others(groups)
    logits = cosines(x, x) / temperature
    negatives = logits.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return functional.softplus(negatives - logits)[mates].mean()


def circle(x, groups, gamma, margin):
    scores = cosines(x, x)
    mates, others = mates_and_others(groups)
    near, far = torch.relu(1 + margin - scores), torch.relu(scores + margin)
    positives = gamma * near.detach() * (1 - margin - scores)
    negatives = gamma * far.detach() * (scores - margin)
    sums = [
        logits.masked_fill(~part, -torch.inf).logsumexp(1)
        for logits, part in ((positives, mates), (negatives, others))
    ]
    both = mates.any(1) & others.any(1)
    return functional.softplus(sum(sums)[both]).sum() / len(x)


def decoupled_contrastive(x, y, temperature):
    logits = cosines(x, y) / temperature
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    return (logits.masked_fill(eye, -torch.inf).logsumexp(1) - logits.diagonal()).mean()


def debiased_contrastive(x, y, temperature, tau_plus):
    logits, others = cosines(x, y) / temperature, len(x) - 1
    weights, positive = logits.exp(), logits.diagonal()
    mean = (weights.sum(1) - weights.diagonal()) / others
    mean = (mean - tau_plus * weights.diagonal()) / (1 - tau_plus)
    mean = mean.clamp(min=math.exp(-1 / temperature))
    return ((weights.diagonal() + others * mean).log() - positive).mean()


def multi_similarity(x, groups, alpha, beta, base):
    scores = cosines(x, x) - base
    zeros = scores.new_zeros(len(x), 1)
    losses = 0.0
    for steepness, part in zip((-alpha, beta), mates_and_others(groups), strict=True):
        logits = (steepness * scores).masked_fill(~part, -torch.inf)
        losses = losses + torch.cat([zeros, logits], 1).logsumexp(1) / abs(steepness)
    return losses.mean()


def batch_hard_triplet(x, groups, margin):
    mates, others = mates_and_others(groups)
    distances = torch.cdist(x, x)
    far = distances.masked_fill(~mates, -torch.inf).max(1).values
    near = distances.masked_fill(~others, torch.inf).min(1).values
    return torch.relu(far - near + margin).mean()


def signs(groups, like):
    same = groups[0][:, None] == groups[1]
    return torch.where(same, 1.0, -1.0).to(like.dtype)


def matrix_cross_entropy(x, y, groups, temperature):
    return functional.cross_entropy(cosines(x, y) / temperature, signs(groups, x))


def matrix_mse(x, y, groups):
    return functional.mse_loss(cosines(x, y), signs(groups, x))


def distill(x, y, teacher_x, teacher_y, temperature, teacher_temperature):
    student = torch.log_softmax(cosines(x, y) / temperature, 1)
    teacher = cosines(teacher_x.to(x.dtype), teacher_y.to(x.dtype)) / teacher_temperature
    teacher = torch.log_softmax(teacher, 1)
    divergence = functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return temperature**2 * divergence


def distill_margins(x, y, teacher_x, teacher_y, kind):
    assert kind == "margin_mse"
    student, teacher = cosines(x, y), cosines(teacher_x.to(x.dtype), teacher_y.to(x.dtype))
    student, teacher = (scores.diagonal()[:, None] - scores for scores in (student, teacher))
    return functional.mse_loss(student, teacher) * len(y) / (len(y) - 1)


def cosent(scores, labels, scale):
    logits = scores * scale
    gaps = logits[None, :] - logits[:, None]
    gaps = gaps.masked_fill(labels[:, None] <= labels, -torch.inf)
    return torch.cat([gaps.flatten(), gaps.new_zeros(1)]).logsumexp(0)


def cosent_matrix(x, y, groups, scale):
    return cosent(cosines(x, y).flatten(), signs(groups, x).flatten(), scale)


def angle(u, v, labels, scale):
    (a, b), (c, d) = u.chunk(2, 1), v.chunk(2, 1)
    parts = (a * c + b * d) + (b * c - a * d)
    scores = parts.sum(1).abs() / (u.norm(dim=1) * v.norm(dim=1))
    return cosent(scores, labels, scale)


def cosine_regression(u, v, labels):
    return functional.mse_loss(functional.cosine_similarity(u, v), labels.to(u.dtype))


def triplet_margin(anchors, positives, negatives, margin):
    return functional.triplet_margin_loss(anchors, positives, negatives, margin=margin, eps=0.0)


FORMULAS = {
    "info_nce": info_nce,
    "info_nce symmetric": symmetric_info_nce,
    "info_nce learnt": info_nce,
    "info_nce directions": info_nce_directions,
    "info_nce own negatives": info_nce_own_negatives,
    "info_nce references": info_nce_references,
    "info_nce guided": guided_info_nce,
    "info_nce smoothed": smoothed_info_nce,
    "info_nce biased": biased_info_nce,
    "info_nce prefixes": info_nce_prefixes,
    "siglip": siglip,
    "siglip learnt": siglip,
    "siglip groups": grouped_siglip,
    "siglip weighed": weighed_siglip,
    "full_triplet": full_triplet,
    "sup_con": sup_con,
    "nt_xent": nt_xent,
    "multi_similarity": multi_similarity,
    "circle": circle,
    "decoupled_contrastive": decoupled_contrastive,
    "debiased_contrastive": debiased_contrastive,
    "batch_hard_triplet": batch_hard_triplet,
    "matrix_cross_entropy": matrix_cross_entropy,
    "matrix_mse": matrix_mse,
    "distill": distill,
    "distill margins": distill_margins,
    "cosent_matrix": cosent_matrix,
    "cosent": cosent,
    "cosent distinct": cosent,
    "angle": angle,
    "cosine_regression": cosine_regression,
    "triplet_margin": triplet_margin,
}


def bind_formula(formula):
    """make(problem) from a function formula(*leaves, *arguments, **options)."""

    def make(problem):
        arguments, options = problem.arguments, problem.options
        return lambda *leaves: formula(*leaves, *arguments, **options)

    return make


BASELINE = Baseline(
    "eager torch", "torch", {name: bind_formula(formula) for name, formula in FORMULAS.items()}
)
