"""Metrics of similarities and rankings, as plain dictionaries of numbers.

Correlations come from scipy, average precision and curves from scikit-learn. The nearest neighbours
come from `fastsim.top_k`, which holds no query-by-corpus matrix.
"""

import math

import torch

from fastsim.dot_products import as_cosines
from fastsim.scores import paired_cosine_similarity, top_k

SIMILARITIES = {
    "cosine": paired_cosine_similarity,
    "dot": lambda u, v: (u * v).sum(1),
    "euclidean": lambda u, v: -torch.linalg.vector_norm(u - v, dim=1),
    "manhattan": lambda u, v: -torch.linalg.vector_norm(u - v, ord=1, dim=1),
}


def correlations(scores, gold):
    """Pearson and Spearman correlation of two lists of numbers; NaN if one of them is constant."""
    from scipy import stats

    if len(gold) < 2 or min(gold) == max(gold) or min(scores) == max(scores):
        return {"pearson": math.nan, "spearman": math.nan}
    return {
        "pearson": float(stats.pearsonr(scores, gold).statistic),
        "spearman": float(stats.spearmanr(scores, gold).statistic),
    }


def _starting_with(similarity):
    """`SIMILARITIES`, this one first."""
    return {similarity: SIMILARITIES[similarity], **SIMILARITIES}


def pair_correlations(u, v, gold, *, similarity="cosine"):
    """`correlations` of paired rows u, v (N, D) under each similarity with gold scores (N,).

    similarity: the first in the result.
    """
    result = {}
    for name, score in _starting_with(similarity).items():
        values = correlations(score(u, v).tolist(), gold)
        result |= {f"{kind}_{name}": value for kind, value in values.items()}
    return result


def binary(scores, labels):
    """Accuracy and F1 at their best thresholds, these thresholds, and average precision.

    scores: numbers, larger for label 1. labels: 0 and 1, both present.
    """
    import numpy as np
    from sklearn import metrics

    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    false_rate, true_rate, thresholds = metrics.roc_curve(labels, scores, drop_intermediate=False)
    share = labels.mean()
    accuracy = true_rate * share + (1 - false_rate) * (1 - share)
    best = int(accuracy.argmax())
    precision, recall, f1_thresholds = metrics.precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    top = int(f1[:-1].argmax())
    return {
        "accuracy": float(accuracy[best]),
        # The first threshold is infinite.
        "accuracy_threshold": float(min(thresholds[best], scores.max() + 1)),
        "f1": float(f1[top]),
        "f1_threshold": float(f1_thresholds[top]),
        "average_precision": float(metrics.average_precision_score(labels, scores)),
    }


def pair_binary(u, v, labels, *, similarity="cosine"):
    """`binary` of paired rows u, v (N, D) under each similarity with labels 0 and 1 (N,).

    similarity: the first in the result.
    """
    result = {}
    for name, score in _starting_with(similarity).items():
        values = binary(score(u, v).tolist(), labels)
        result |= {f"{kind}_{name}": value for kind, value in values.items()}
    return result


def classes(logits, labels):
    """Accuracy and macro F1 of class logits (N, C) against labels (N,)."""
    from sklearn import metrics

    chosen = logits.argmax(1).tolist()
    return {
        "accuracy": float(metrics.accuracy_score(labels, chosen)),
        "macro_f1": float(metrics.f1_score(labels, chosen, average="macro")),
    }


def triplets(anchors, positives, negatives, *, similarity="cosine"):
    """Share of rows whose positive is closer than the negative; all three (N, D).

    similarity: the first in the result.
    """
    return {
        f"triplet_accuracy_{name}": float(
            (score(anchors, positives) > score(anchors, negatives)).double().mean()
        )
        for name, score in _starting_with(similarity).items()
    }


def retrieval(queries, corpus, relevant, *, left_out=None, depth=10, similarity="cosine"):
    """recall@1, 5, 10, MRR@10 and nDCG@10 of a search.

    queries (Q, D), corpus (M, D). relevant: a non-empty set of corpus rows for each query.
    similarity: "cosine" or "dot", by which rows are ranked.
    left_out: the corpus row that each query leaves out, itself for instance, or -1; None: no query
    leaves out a row. recall@k is the share of a query's relevant rows among its first k.
    """
    extra = 0 if left_out is None else 1
    queries, corpus, _ = as_cosines(queries, corpus, similarity)
    _, nearest = top_k(queries, corpus, min(depth + extra, corpus.shape[0]))
    sums = dict.fromkeys(("recall@1", "recall@5", "recall@10", "mrr@10", "ndcg@10"), 0.0)
    for query, row in enumerate(nearest.tolist()):
        if left_out is not None:
            row = [place for place in row if place != left_out[query]]
        hits = [place in relevant[query] for place in row[:depth]]
        for k in (1, 5, 10):
            sums[f"recall@{k}"] += sum(hits[:k]) / len(relevant[query])
        sums["mrr@10"] += 1 / (1 + hits.index(True)) if True in hits else 0.0
        gain = sum(1 / math.log2(place + 2) for place, hit in enumerate(hits) if hit)
        ideal = sum(1 / math.log2(p + 2) for p in range(min(depth, len(relevant[query]))))
        sums["ndcg@10"] += gain / ideal
    return {name: value / len(relevant) for name, value in sums.items()}
