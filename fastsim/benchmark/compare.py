"""Whether a repeated run says the same: no ratio beyond its stated spread."""

from fastsim.benchmark.found import Found


def shared(first, second):
    """[(place, ratio, ratio)] of all that both runs measured; each run is (about, rows).

    Ratios are those of every implementation to the first of fastsim's in the same turns, as
    (value, least, most). A place is (loss, implementation, N, D, pass). ValueError where the runs
    have none in common.
    """
    earlier, later = Found(*first), Found(*second)
    found = []
    for loss, name, rows, width, which in earlier.times:
        ours = earlier.ours(loss, rows, width, which)
        if ours is None or name == ours:
            continue
        pair = [run.ratio(loss, name, ours, rows, width, which) for run in (earlier, later)]
        if None not in pair:
            found.append(((loss, name, rows, width, which), *pair))
    if not found:
        raise ValueError("against: wanted a run with ratios at the same places, got none")
    return found


def changed(found):
    """Of what `shared` returns, the places where the two spreads do not meet."""
    return [
        (place, one, two)
        for place, one, two in found
        if one[1] > two[2] or one[2] < two[1]  # least beyond the other's most
    ]


def text(found):
    """Lines for a terminal, of what `shared` returns."""
    beyond = changed(found)
    lines = [f"{len(beyond)} of {len(found)} ratios changed by more than their spread"]
    for (loss, name, rows, width, which), *pair in beyond:
        spreads = (f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in pair)
        lines.append(f"  {loss}, {rows:,} x {width}, {which}, {name}: {', now '.join(spreads)}")
    return "\n".join(lines)
