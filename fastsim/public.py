"""All public names except `Encoder`; `losses` has the losses as modules and as specifications.

`fastsim/__init__.py` imports this module when one of the names is first used.
"""

from fastsim import losses
from fastsim.backends import backends, use_backend
from fastsim.backends.panel import panel_size
from fastsim.batch_metrics import Metrics, metrics
from fastsim.losses import (
    angle,
    angle_similarity,
    batch_hard_triplet,
    circle,
    closest_negative,
    cosent,
    cosent_matrix,
    cosine_regression,
    debiased_contrastive,
    decoupled_contrastive,
    distill,
    full_triplet,
    hardest_pairs,
    info_nce,
    late_interaction,
    late_interaction_distillation,
    matrix_cross_entropy,
    matrix_mse,
    mean_negative,
    multi_similarity,
    nt_xent,
    siglip,
    sup_con,
    triplet_margin,
)
from fastsim.mining import mine_hard_negatives
from fastsim.scores import cosine_similarity, paired_cosine_similarity, top_k
from fastsim.token_scores import max_sim

__all__ = [
    "Metrics",
    "angle",
    "angle_similarity",
    "backends",
    "batch_hard_triplet",
    "circle",
    "closest_negative",
    "cosent",
    "cosent_matrix",
    "cosine_regression",
    "cosine_similarity",
    "debiased_contrastive",
    "decoupled_contrastive",
    "distill",
    "full_triplet",
    "hardest_pairs",
    "info_nce",
    "late_interaction",
    "late_interaction_distillation",
    "losses",
    "matrix_cross_entropy",
    "matrix_mse",
    "max_sim",
    "mean_negative",
    "metrics",
    "mine_hard_negatives",
    "multi_similarity",
    "nt_xent",
    "paired_cosine_similarity",
    "panel_size",
    "siglip",
    "sup_con",
    "top_k",
    "triplet_margin",
    "use_backend",
]
