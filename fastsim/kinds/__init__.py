"""The kinds of tile loss, one record each, and the selections.

What stands in a record (kind.py) is said there alone: state, merging, gradients, bounds. Beside it
a kind has an epilogue in each backend that serves it, under its name; no other file asks for a kind
by name.
"""

from fastsim.kinds.contrast import Circle, MultiPositive, MultiSimilarity
from fastsim.kinds.elementwise import Sigmoid, SquaredError
from fastsim.kinds.levels import Levels
from fastsim.kinds.softmax import Softmax
from fastsim.kinds.triplet import Triplet

KINDS = {
    kind.name: kind
    for kind in (
        Softmax(),
        Sigmoid(),
        SquaredError(),
        MultiSimilarity(),
        MultiPositive(),
        Circle(),
        Levels(),
        Triplet("hard"),
        Triplet("semi-hard"),
    )
}

# What a backend finds by comparing scores, without a state: `Backend.closest`, `Backend.hardest`.
SELECTIONS = ("closest", "hardest")
