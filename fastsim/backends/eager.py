"""The dense formulas in plain torch, on any device: the specification of the other backends.

It has no engine methods: each loss evaluates its own `_from_scores` on the full score matrix.
"""

from fastsim.backends.base import Backend
from fastsim.backends.extras import EXTRAS
from fastsim.kinds import KINDS, LATE_INTERACTION, SELECTIONS


class EagerBackend(Backend):
    """Dense torch: holds as many N x M matrices as autograd needs."""

    name = "eager"
    extras = frozenset(EXTRAS)
    automatic = False  # it serves everything, but takes N x M memory

    def unsupported_reason(self, *tensors, kind=None):
        return self.unsupported_kind(kind)

    def kinds(self):
        return {*KINDS, *SELECTIONS, *LATE_INTERACTION}
