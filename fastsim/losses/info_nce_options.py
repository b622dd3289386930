"""Checks of the options of InfoNCE, alone and together."""

from fastsim.checks import check_choice, check_flags, check_number
from fastsim.losses.further_candidates import GUIDE_STRATEGIES


def check_options(
    temperature,
    symmetric,
    margin,
    exclude_above,
    label_smoothing,
    guide_margin,
    guide_strategy,
):
    """Raises a ValueError or TypeError for an invalid option."""
    check_number("temperature", temperature, positive=True)
    check_flags(symmetric=symmetric)
    check_number("margin", margin, tensor=False)
    check_number("guide_margin", guide_margin, tensor=False)
    check_choice("guide_strategy", guide_strategy, GUIDE_STRATEGIES)
    check_number("label_smoothing", label_smoothing, tensor=False)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: wanted at least 0 and below 1, got {label_smoothing}")
    if exclude_above is not None:
        check_number("exclude_above", exclude_above, tensor=False)
        if exclude_above < 0:
            raise ValueError(f"exclude_above: wanted at least 0, or None, got {exclude_above}")


def check_together(exclude, exclude_above, guide, symmetric, margin, label_smoothing, further):
    """Raises a ValueError for options that have no defined meaning together."""
    names = {
        "exclude": exclude is not None,
        "exclude_above": exclude_above is not None,
        "guide": guide is not None,
        "symmetric": symmetric,
        "margin": margin != 0,
        "directions": len(further.directions) > 1,
        "own_negatives": further.own_negatives is not None,
        "references": further.references is not None,
    }
    refused = []
    if label_smoothing:
        refused = [("label_smoothing", name) for name in names if names[name]]
    for name in ("directions", "own_negatives", "references"):
        if names[name] and symmetric:
            refused.append((name, "symmetric"))
    for name in ("directions", "references"):
        if names[name] and names["exclude_above"]:
            refused.append((name, "exclude_above"))
    if refused:
        name, other = refused[0]
        raise ValueError(f"{name}: cannot be combined with {other}, got both")
