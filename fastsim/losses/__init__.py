"""The losses: functions, modules with the same parameters, and dense specifications.

Each loss has its own file. `SPECIFICATIONS` maps a loss to its dense formula, against which tests
check it. To add a loss, see fastsim/README.md, "Add a loss".
"""

from fastsim.losses.angle import Angle, angle, angle_similarity
from fastsim.losses.batch_hard_triplet import (
    BatchHardTriplet,
    batch_hard_triplet,
    batch_hard_triplet_from_scores,
)
from fastsim.losses.batch_triplets import (
    BatchAllTriplet,
    BatchSemiHardTriplet,
    batch_all_triplet,
    batch_semi_hard_triplet,
)
from fastsim.losses.circle import Circle, circle, circle_from_scores
from fastsim.losses.cosent import CoSENT, cosent, cosent_from_scores
from fastsim.losses.cosent_matrix import CoSENTMatrix, cosent_matrix, cosent_matrix_from_scores
from fastsim.losses.cosine_regression import CosineRegression, cosine_regression
from fastsim.losses.debiased_contrastive import (
    DebiasedContrastive,
    debiased_contrastive,
    debiased_contrastive_from_scores,
)
from fastsim.losses.decoupled_contrastive import (
    DecoupledContrastive,
    decoupled_contrastive,
    decoupled_contrastive_from_scores,
)
from fastsim.losses.distill import Distill, distill, distill_from_scores
from fastsim.losses.full_triplet import FullTriplet, full_triplet, full_triplet_from_scores
from fastsim.losses.hardest import HardestPairs, hardest_pairs
from fastsim.losses.info_nce import InfoNCE, info_nce, info_nce_from_scores
from fastsim.losses.late_interaction import (
    LateInteraction,
    LateInteractionDistillation,
    late_interaction,
    late_interaction_distillation,
    late_interaction_from_scores,
)
from fastsim.losses.matrix_cross_entropy import (
    MatrixCrossEntropy,
    matrix_cross_entropy,
    matrix_cross_entropy_from_scores,
)
from fastsim.losses.matrix_mse import MatrixMSE, matrix_mse, matrix_mse_from_scores
from fastsim.losses.matryoshka import Matryoshka
from fastsim.losses.multi_similarity import (
    MultiSimilarity,
    multi_similarity,
    multi_similarity_from_scores,
)
from fastsim.losses.negatives import (
    closest_negative,
    closest_negative_from_scores,
    mean_negative,
    mean_negative_from_scores,
)
from fastsim.losses.nt_xent import NTXent, nt_xent, nt_xent_from_scores
from fastsim.losses.siglip import SigLIP, siglip, siglip_from_scores
from fastsim.losses.softmax_classification import SoftmaxClassification
from fastsim.losses.sup_con import SupCon, sup_con, sup_con_from_scores
from fastsim.losses.triplet_margin import TripletMargin, triplet_margin

# Loss function -> its dense specification, a function of a score matrix or a list of scores.
SPECIFICATIONS = {
    info_nce: info_nce_from_scores,
    debiased_contrastive: debiased_contrastive_from_scores,
    decoupled_contrastive: decoupled_contrastive_from_scores,
    sup_con: sup_con_from_scores,
    nt_xent: nt_xent_from_scores,
    multi_similarity: multi_similarity_from_scores,
    circle: circle_from_scores,
    siglip: siglip_from_scores,
    matrix_cross_entropy: matrix_cross_entropy_from_scores,
    matrix_mse: matrix_mse_from_scores,
    distill: distill_from_scores,
    full_triplet: full_triplet_from_scores,
    batch_hard_triplet: batch_hard_triplet_from_scores,
    late_interaction: late_interaction_from_scores,
    cosent: cosent_from_scores,
    cosent_matrix: cosent_matrix_from_scores,
}

__all__ = [
    "SPECIFICATIONS",
    "Angle",
    "BatchAllTriplet",
    "BatchHardTriplet",
    "BatchSemiHardTriplet",
    "Circle",
    "CoSENT",
    "CoSENTMatrix",
    "CosineRegression",
    "DebiasedContrastive",
    "DecoupledContrastive",
    "Distill",
    "FullTriplet",
    "HardestPairs",
    "InfoNCE",
    "LateInteraction",
    "LateInteractionDistillation",
    "MatrixCrossEntropy",
    "MatrixMSE",
    "Matryoshka",
    "MultiSimilarity",
    "NTXent",
    "SigLIP",
    "SoftmaxClassification",
    "SupCon",
    "TripletMargin",
    "angle",
    "angle_similarity",
    "batch_all_triplet",
    "batch_hard_triplet",
    "batch_hard_triplet_from_scores",
    "batch_semi_hard_triplet",
    "circle",
    "circle_from_scores",
    "closest_negative",
    "closest_negative_from_scores",
    "cosent",
    "cosent_from_scores",
    "cosent_matrix",
    "cosent_matrix_from_scores",
    "cosine_regression",
    "debiased_contrastive",
    "debiased_contrastive_from_scores",
    "decoupled_contrastive",
    "decoupled_contrastive_from_scores",
    "distill",
    "distill_from_scores",
    "full_triplet",
    "full_triplet_from_scores",
    "hardest_pairs",
    "info_nce",
    "info_nce_from_scores",
    "late_interaction",
    "late_interaction_distillation",
    "late_interaction_from_scores",
    "matrix_cross_entropy",
    "matrix_cross_entropy_from_scores",
    "matrix_mse",
    "matrix_mse_from_scores",
    "mean_negative",
    "mean_negative_from_scores",
    "multi_similarity",
    "multi_similarity_from_scores",
    "nt_xent",
    "nt_xent_from_scores",
    "siglip",
    "siglip_from_scores",
    "sup_con",
    "sup_con_from_scores",
    "triplet_margin",
]
