"""What each kind of loss does with a panel of scores: csrc/epilogue.h in plain torch.

`forward` returns the state of a panel (fastsim/tile_loss.py) and does not change the scores.
`score_grad` turns the scores into score gradients, in place. Both take a `Block` after
`Block.leave_out` and `prepare`. Each holds one or two more matrices of the panel's size.
"""

from fastsim.backends.torch.epilogues.base import narrowed
from fastsim.backends.torch.epilogues.contrast import (
    Circle,
    Debiased,
    MultiPositive,
    MultiSimilarity,
)
from fastsim.backends.torch.epilogues.distillation import Distillation
from fastsim.backends.torch.epilogues.elementwise import Sigmoid, SquaredError
from fastsim.backends.torch.epilogues.levels import FEW, Levels
from fastsim.backends.torch.epilogues.softmax import Decoupled, Softmax

__all__ = ["EPILOGUES", "FEW", "narrowed"]

EPILOGUES = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(),
    "squared_error": SquaredError(),
    "distillation": Distillation(),
    "multi_similarity": MultiSimilarity(),
    "multi_positive": MultiPositive(),
    "circle": Circle(),
    "decoupled": Decoupled(),
    "debiased": Debiased(),
    "levels": Levels(),
}
