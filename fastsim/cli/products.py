"""The matrix products of each loss, for `fastsim plan`."""

# Loss -> (products of N x M x D, forward and backward; the same on a ring). See
# fastsim/engine/passes.py: four where the score gradients depend on sums over columns, less the one
# that a backend saves for the scores that it keeps. On a ring each forward pass and the score
# gradients need a round of their own (fastsim/engine/ring.py).
PRODUCTS = {
    "info_nce": (3, 4),
    "info_nce symmetric": (4, 4),
    "decoupled_contrastive": (3, 4),
    "sup_con": (3, 4),
    "nt_xent": (3, 5),
    "multi_similarity": (3, 4),
    "circle": (3, 4),
    "siglip": (3, 4),
    "matrix_cross_entropy": (3, 4),
    "matrix_mse": (3, 4),
    "cosent_matrix": (4, 4),
    "full_triplet": (1, 1),
    "batch_hard_triplet": (1, 1),
}
# Losses of one set of embeddings, of whose scores the `cpu` backend keeps some
# (fastsim/backends/cpu/mirrored.py).
ONE_SET = {"sup_con", "nt_xent", "multi_similarity", "circle"}
