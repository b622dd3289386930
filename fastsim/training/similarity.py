"""The similarity of a model, which a search of its embeddings uses."""

import torch

from fastsim.encoders.names import ModelError


def similarity_of(encoder):
    """The similarity of an encoder, "cosine" or "dot"; ModelError for any other."""
    if encoder.similarity not in ("cosine", "dot"):
        raise ModelError(
            "model: wanted one with similarity cosine or dot, got similarity_fn_name"
            f" {encoder.similarity!r}"
        )
    return encoder.similarity


def as_cosines(queries, corpus, similarity):
    """(queries, corpus, factors (N, 1)); their cosines times the factors are the similarity.

    For dot products an additional column gives all rows of the corpus the norm of the longest; it
    is 0 in the queries. Then the cosines of a query have the order of its dot products.
    Source: Bachrach et al. 2014, "Speeding Up the Xbox Recommender System Using a Euclidean
    Transformation for Inner-Product Spaces", section 3.
    """
    if similarity == "cosine":
        return queries, corpus, 1.0
    norms, lengths = (torch.linalg.vector_norm(x.double(), dim=1) for x in (corpus, queries))
    longest = norms.max()
    missing = (longest**2 - norms**2).sqrt()[:, None].to(corpus.dtype)
    corpus = torch.cat([corpus, missing], 1)
    queries = torch.cat([queries, queries.new_zeros(len(queries), 1)], 1)
    return queries, corpus, (lengths * longest)[:, None].to(queries.dtype)
