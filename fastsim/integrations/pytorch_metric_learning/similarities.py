"""What a distance of pytorch-metric-learning is to fastsim: a similarity, or none."""

from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity

PRODUCTS = CosineSimilarity, DotProductSimilarity


def similarity(distance):
    """ "cosine" or "dot", the `similarity=` of fastsim's losses, or None for any other distance."""
    if type(distance) not in PRODUCTS:
        return None
    if not distance.normalize_embeddings:
        return "dot"
    return "cosine" if distance.p == 2 else None


def is_cosine(distance):
    """Whether the distance is the cosine."""
    return similarity(distance) == "cosine"
