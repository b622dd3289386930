"""open_clip's own losses, from the module that ours are subclasses of, and features for them."""

import torch

from tests.seeds import fresh


def load():
    """The module, or None where open_clip_torch is not installed."""
    try:
        from fastsim.integrations.open_clip import peer

        return peer.losses()
    except ImportError:
        return None


def features(rows, width, *, unit, seed):
    generator = fresh(seed)
    x = torch.randn(rows, width, generator=generator)
    return torch.nn.functional.normalize(x) if unit else 0.3 * x


def share(tensor, rank, rows):
    """The rows of a rank, of which each has so many."""
    return tensor[rank * rows : (rank + 1) * rows]
