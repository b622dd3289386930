"""By what a model's embeddings are searched: its own similarity."""

import torch

from fastsim.encoders.names import ModelError


def similarity_of(encoder):
    """What the encoder's embeddings are searched by: "cosine" or "dot", or ModelError."""
    if encoder.similarity not in ("cosine", "dot"):
        raise ModelError(
            "model: wanted one that a search compares by cosine or dot, got similarity_fn_name"
            f" {encoder.similarity!r}"
        )
    return encoder.similarity


def as_cosines(queries, corpus, similarity):
    """(queries, corpus, lengths (N, 1)): their cosines times the lengths are the similarity.

    A dot product is one: one more column makes all rows of the corpus as long as the longest, with
    0 in the queries, and the order of a query's cosines is that of its products.
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
