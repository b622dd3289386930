"""The kinds of tile loss, one record each, and the selections.

The record (kind.py) alone defines the state of a kind, how states merge, the gradients and their
bounds. Each backend that serves the kind has an epilogue under its name. Only the losses, the
backends and `verify` use kinds by name. To add a kind, subclass `Kind` in the file where it fits
best and add an instance to KINDS there.
"""

from fastsim.kinds import contrast, distillation, elementwise, levels, softmax, triplet

KINDS = {
    kind.name: kind
    for family in (softmax, elementwise, contrast, distillation, levels, triplet)
    for kind in family.KINDS
}

# Columns chosen by comparing scores, without a state: `Backend.closest`, `Backend.hardest`.
SELECTIONS = ("closest", "hardest")

# Scores of sets of tokens, not a tile loss: `Backend.max_sim`.
LATE_INTERACTION = ("max_sim",)
