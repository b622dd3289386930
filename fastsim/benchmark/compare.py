"""Compares a run with a repetition: whether every ratio stays within its spread."""

from fastsim.benchmark.measurements import Measurements


def shared(first, second):
    """[(place, ratio, ratio)] of all that both runs measured; each run is (environment, rows).

    A ratio is the time of an implementation over that of fastsim's first backend, measured in the
    same turns, as (value, least, most). A place is (loss, implementation, N, D, pass). ValueError
    if the runs have no place in common.
    """
    earlier, later = Measurements(*first), Measurements(*second)
    ratios = []
    for loss, name, rows, width, which in earlier.times:
        ours = earlier.ours(loss, rows, width, which)
        if ours is None or name == ours:
            continue
        pair = [run.ratio(loss, name, ours, rows, width, which) for run in (earlier, later)]
        if None not in pair:
            ratios.append(((loss, name, rows, width, which), *pair))
    if not ratios:
        raise ValueError("against: wanted a run with ratios at the same places, got none")
    return ratios


def changed(ratios):
    """The items of `shared` whose two spreads do not overlap."""
    return [
        (place, first, second)
        for place, first, second in ratios
        if first[1] > second[2] or first[2] < second[1]  # the least of one exceeds the other's most
    ]


def text(ratios):
    """The result of `shared` as lines for a terminal."""
    outside = changed(ratios)
    lines = [f"{len(outside)} of {len(ratios)} ratios changed by more than their spread"]
    for (loss, name, rows, width, which), *pair in outside:
        spreads = (f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in pair)
        lines.append(f"  {loss}, {rows:,} x {width}, {which}, {name}: {', now '.join(spreads)}")
    return "\n".join(lines)
