"""The kinds of tile loss, one record each, and the selections.

A record (kind.py) is the only place that tells a kind's state, merging, gradients and bounds.
Beside it a kind has an epilogue in each backend that serves it, under its name. A loss names the
kind that it uses; apart from that only the backends and `verify` ask for a kind by name. To add
one: a subclass of `Kind` in the file that it fits best, named in the file's KINDS.
"""

from fastsim.kinds import contrast, distillation, elementwise, levels, softmax, triplet

KINDS = {
    kind.name: kind
    for family in (softmax, elementwise, contrast, distillation, levels, triplet)
    for kind in family.KINDS
}

# What a backend finds by comparing scores, without a state: `Backend.closest`, `Backend.hardest`.
SELECTIONS = ("closest", "hardest")

# Scores of sets of tokens, which are no tile loss: `Backend.max_sim`.
LATE_INTERACTION = ("max_sim",)
