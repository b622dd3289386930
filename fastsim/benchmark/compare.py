"""Whether a repeated run says the same: no ratio beyond its stated spread."""

from fastsim.benchmark.found import Found


def changed(first, second):
    """[(place, ratio, ratio)] whose spreads (least to most) do not meet; each is a (about, rows).

    Ratios are those of every implementation to the first of fastsim's in the same turns. A place is
    (loss, implementation, N, D, pass); only places that both runs measured are compared, and
    ValueError is raised where there is none.
    """
    earlier, later = Found(*first), Found(*second)
    shared, found = 0, []
    for loss, name, rows, width, which in earlier.times:
        ours = earlier.ours(loss, rows, width, which)
        if ours is None or name == ours:
            continue
        pair = [run.ratio(loss, name, ours, rows, width, which) for run in (earlier, later)]
        if None in pair:
            continue
        shared += 1
        (_, low, high), (_, least, most) = pair
        if least > high or most < low:
            found.append(((loss, name, rows, width, which), *pair))
    if not shared:
        raise ValueError("against: wanted a run with ratios at the same places, got none")
    return found


def text(found):
    """Lines for a terminal."""
    if not found:
        return "no ratio changed by more than its spread"
    lines = ["ratios that changed by more than their spread:"]
    for (loss, name, rows, width, which), *pair in found:
        spreads = (f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in pair)
        lines.append(f"  {loss}, {rows:,} x {width}, {which}, {name}: {', now '.join(spreads)}")
    return "\n".join(lines)
