"""A search by dot products as one by cosines, which is what `top_k` computes."""

import torch

from fastsim.precision import compute_dtype, widened


def as_cosines(queries, corpus, similarity):
    """(queries, corpus, factors (N, 1)); their cosines times the factors are the similarity.

    For dot products an additional column gives all rows of the corpus the norm of the longest; it
    is 0 in the queries. Then the cosines of a query have the order of its dot products. Rows of 16
    bits become float32, since the additional column is not exact. For cosines the embeddings stay
    as they are and the factors are 1.
    Source: Bachrach et al. 2014, "Speeding Up the Xbox Recommender System Using a Euclidean
    Transformation for Inner-Product Spaces", section 3.
    """
    if similarity == "cosine":
        return queries, corpus, queries.new_ones(len(queries), 1, dtype=compute_dtype(queries))
    queries, corpus = (rows.to(compute_dtype(rows)) for rows in (queries, corpus))
    norms, lengths = (torch.linalg.vector_norm(widened(x), dim=1) for x in (corpus, queries))
    longest = norms.max()
    missing = (longest**2 - norms**2).sqrt()[:, None].to(corpus.dtype)
    corpus = torch.cat([corpus, missing], 1)
    queries = torch.cat([queries, queries.new_zeros(len(queries), 1)], 1)
    return queries, corpus, (lengths * longest)[:, None].to(queries.dtype)
