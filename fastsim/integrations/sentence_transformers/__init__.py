"""The losses of sentence-transformers 6 with their interface, arguments, defaults and numbers.

    from fastsim.integrations import sentence_transformers as losses

    loss = losses.MultipleNegativesRankingLoss(model)

Each is a subclass of the loss of that name, so that trainers, MatryoshkaLoss, model cards and
isinstance accept it in its place. The loss itself is computed without an N x N matrix. If an option
has no fused form, or a method of theirs has been replaced, the code of sentence-transformers
computes the loss, and a warning says so once. Every other name is sentence-transformers'.

`scale` and `temperature` may be a torch.nn.Parameter, which the trainer then learns, with a
learning rate of its own by `learning_rate_mapping`. In several processes the trainer wraps only the
model, so that each process learns its own value, as for the classifier of SoftmaxLoss; and the
trainer's checkpoints do not hold the value. `FullTripletLoss`, `SigLIPLoss` and `CoSENTMatrixLoss`
exist only here.
"""
# ruff: noqa: E402

from fastsim.integrations import names

names.check_version("sentence-transformers", 6)  # before importing what older versions lack

from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.sentence_transformers.batch_triplets import (
    BatchAllTripletLoss,
    BatchHardSoftMarginTripletLoss,
    BatchHardTripletLoss,
    BatchSemiHardTripletLoss,
)
from fastsim.integrations.sentence_transformers.contrastive_tension import (
    ContrastiveTensionLossInBatchNegatives,
)
from fastsim.integrations.sentence_transformers.cosent import AnglELoss, CoSENTLoss
from fastsim.integrations.sentence_transformers.distillation import (
    DistillKLDivLoss,
    MarginMSELoss,
)
from fastsim.integrations.sentence_transformers.gist import CachedGISTEmbedLoss, GISTEmbedLoss
from fastsim.integrations.sentence_transformers.matrix import (
    CoSENTMatrixLoss,
    FullTripletLoss,
    SigLIPLoss,
)
from fastsim.integrations.sentence_transformers.mega_batch import MegaBatchMarginLoss
from fastsim.integrations.sentence_transformers.orthogonal import (
    GlobalOrthogonalRegularizationLoss,
)
from fastsim.integrations.sentence_transformers.pairs import (
    CosineSimilarityLoss,
    SoftmaxLoss,
    TripletLoss,
)
from fastsim.integrations.sentence_transformers.ranking import (
    CachedMultipleNegativesRankingLoss,
    CachedMultipleNegativesSymmetricRankingLoss,
    MultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
)

__all__ = [
    "AnglELoss",
    "BatchAllTripletLoss",
    "BatchHardSoftMarginTripletLoss",
    "BatchHardTripletLoss",
    "BatchSemiHardTripletLoss",
    "CachedGISTEmbedLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "CoSENTLoss",
    "CoSENTMatrixLoss",
    "ContrastiveTensionLossInBatchNegatives",
    "CosineSimilarityLoss",
    "DistillKLDivLoss",
    "FullTripletLoss",
    "GISTEmbedLoss",
    "GlobalOrthogonalRegularizationLoss",
    "MarginMSELoss",
    "MegaBatchMarginLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "SigLIPLoss",
    "SoftmaxLoss",
    "TripletLoss",
]

__getattr__, __dir__, _theirs = names.forwarding(__name__, theirs)
__all__ += [name for name in _theirs if name not in __all__]
