"""The name of a backend, and what it can serve."""

from fastsim.backends.extras import EXTRAS


class Serving:
    name: str
    automatic = True  # whether `auto` may choose it
    by_verdict = False  # whether `auto` needs a verdict to choose it (fastsim/verify)
    extras = frozenset()  # the optional features of a tile loss (EXTRAS) that it supports

    def unsupported_reason(self, *tensors, kind=None):
        """None if it can serve these tensors, else a sentence that says why not. Without tensors:
        whether it can run on this machine at all.

        kind: a name in `KINDS`, `SELECTIONS` or `LATE_INTERACTION` of `fastsim.kinds`.
        """
        raise NotImplementedError

    def kinds(self):
        """The names in `KINDS`, `SELECTIONS` and `LATE_INTERACTION` that it has kernels for."""
        raise NotImplementedError

    def unsupported_kind(self, kind):
        """None if it serves this kind (None: any), else a sentence that says why not."""
        if kind is None or kind in self.kinds():
            return None
        return f"it has no kernels of kind {kind!r}"

    def unsupported_extra(self, extras):
        """None if it supports all of these extras (EXTRAS), else a sentence that says why not."""
        return next((EXTRAS[extra] for extra in extras if extra not in self.extras), None)

    def turning_widths(self, dtype, device):
        """The widths D from which on its kernels take another path; `fastsim verify` tries each."""
        return ()

    def note(self):
        """What `fastsim info` says after "usable"."""
        return ""
