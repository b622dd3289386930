"""The similarity of a model, by which its embeddings are compared and ranked."""

from fastsim.encoders.names import ModelError

_RANKED = ("cosine", "dot")  # the similarities that `top_k` can rank by


def similarity_of(encoder):
    """The similarity of an encoder, "cosine" or "dot"; ModelError for any other."""
    if encoder.similarity not in _RANKED:
        raise ModelError(
            "model: wanted one with similarity cosine or dot, got similarity_fn_name"
            f" {encoder.similarity!r}"
        )
    return encoder.similarity


def ranking_similarity(encoder):
    """The similarity of an encoder if it is "cosine" or "dot"; "cosine" for any other."""
    return encoder.similarity if encoder.similarity in _RANKED else "cosine"
