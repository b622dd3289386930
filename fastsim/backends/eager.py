"""The dense formulas in plain torch, on any device: the specification of the other backends.

It has no engine methods: each loss evaluates its own `_from_scores` on the full score matrix.
"""

from fastsim.backends.base import Backend
from fastsim.backends.extras import EXTRAS
from fastsim.kinds import KINDS, LATE_INTERACTION, SELECTIONS


class EagerBackend(Backend):
    """Dense torch: holds the N x M matrix as often as autograd asks."""

    name = "eager"
    extras = frozenset(EXTRAS)
    automatic = False  # the specification: it serves everything, in N x M memory

    def unsupported_reason(self, *tensors, kind=None):
        return self.unsupported_kind(kind)

    def kinds(self):
        return {*KINDS, *SELECTIONS, *LATE_INTERACTION}
