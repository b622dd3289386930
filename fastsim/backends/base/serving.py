"""What a backend serves, and what it is called."""

from fastsim.backends.extras import EXTRAS


class Serving:
    name: str
    automatic = True  # whether `auto` may choose it
    by_verdict = False  # whether `auto` may where a verdict calls it right (fastsim/verify)
    extras = frozenset()  # the optional features of a tile loss (EXTRAS) that it has

    def unsupported_reason(self, *tensors, kind=None):
        """None if these tensors can be served (no tensors: if the machine can), else a sentence.

        kind: what is to be done with their scores, a name of `fastsim.kinds`: of
            `KINDS`, `SELECTIONS` or `LATE_INTERACTION`.
        """
        raise NotImplementedError

    def kinds(self):
        """The names of `KINDS`, `SELECTIONS` and `LATE_INTERACTION` that it has kernels for."""
        raise NotImplementedError

    def unsupported_kind(self, kind):
        """None if it serves that kind, or if None is asked for; else a sentence."""
        if kind is None or kind in self.kinds():
            return None
        return f"it has no kernels of kind {kind!r}"

    def unsupported_extra(self, extras):
        """None if it has all of these extras (EXTRAS), else a sentence."""
        return next((EXTRAS[extra] for extra in extras if extra not in self.extras), None)

    def turning_widths(self, dtype, device):
        """Widths of rows from which on its kernels go another way: a check tries each of them."""
        return ()

    def note(self):
        """What `fastsim info` adds to "usable"."""
        return ""
