"""What each loss multiplies, for `fastsim plan`."""

# Products of N x M x D that a loss makes of the scores, forward and backward
# (fastsim/engine/passes.py): four where the score gradients look at columns, one of them less for
# the scores that a backend keeps. Around a ring each forward pass and the score gradients are
# a round of their own (fastsim/engine/ring.py).
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
