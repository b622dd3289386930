"""What each kind of loss does with a panel of scores, in plain torch (csrc/epilogue.h).

`forward` leaves the panel as it is and returns the state of its rows and columns (fastsim/tile.py);
`score_grad` turns the scores into score gradients, in place. Both take a `Block`, whose left-out
scores are at LEFT_OUT, and hold one or two matrices of the panel's size beside it.
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
