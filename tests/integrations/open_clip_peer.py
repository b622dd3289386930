"""open_clip's own losses, from the module that ours are subclasses of, and features for them."""

import torch

from tests.measure import conditioning
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


def found_by(results, ours, theirs, given):
    """(results of ours in float32, of theirs in float32 and float64, how rounding moves these).

    results: (loss, given, dtype) -> tensors.
    """
    wide = [t if t is None else t.double() for t in given]
    moved = conditioning(lambda given: results(theirs, given, torch.float64), wide)
    eps = torch.finfo(torch.float32).eps
    return (
        results(ours, given, torch.float32),
        results(theirs, given, torch.float32),
        results(theirs, given, torch.float64),
        [eps * move for move in moved],
    )


def arguments(unit, scale_shape, biased, *, rows=33, width=20, seed=5):
    """(images, texts, scale, bias), the bias only if `biased`."""
    image, text = (features(rows, width, unit=unit, seed=seed + k) for k in range(2))
    scale = torch.full(scale_shape, 14.3)
    bias = torch.tensor(-7.0) if biased else None
    return image, text, scale, bias
