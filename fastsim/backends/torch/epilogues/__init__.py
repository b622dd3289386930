"""What each kind of loss does with a panel of scores: csrc/epilogue.h in plain torch.

`forward` returns the state of a panel's rows and columns (fastsim/tile.py) and leaves the scores as
it was given them; `score_grad` turns them into score gradients, in place. Both take a `Block` that
`prepare` has changed, whose left-out scores are at LEFT_OUT, so that the product's scores are lost;
and they hold one or two matrices of the panel's size beside it.
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
