"""Two runs as one: repeats that lie far apart show what a machine does over more than a second."""

import json

_SAME = ("device", "kind", "versions", "commit")
_ABOUT = ("measure", "name", "loss", "implementation", "rows", "width", "dtype", "pass", "options")
_RATES = ("GFLOP/s", "GB/s", "G/s")  # of the best repeat


def joined(first, second):
    """What either run measured, each (about, rows); times have the repeats of both.

    ValueError for runs of different code, versions or devices.
    """
    (about, rows), (other, more) = first, second
    for name in _SAME:
        if about[name] != other[name]:
            raise ValueError(f"add: wanted the {name} {about[name]}, got {other[name]}")
    found = {_place(row): row for row in rows}
    for row in more:
        found[_place(row)] = _both(found.get(_place(row)), row)
    return about | {
        "runs": about.get("runs", 1) + other.get("runs", 1),
        "load average": max(about["load average"], other["load average"]),
    }, list(found.values())


def _place(row):
    return json.dumps([row.get(name) for name in _ABOUT])


def _both(row, other):
    if row is None or "not measured" in row:
        return other
    if "repeats ms" not in row or "not measured" in other:
        return row
    both = row | {
        "repeats ms": [*row["repeats ms"], *other["repeats ms"]],
        "rounds": row["rounds"] + other["rounds"],
    }
    both.pop("median ms", None)  # it is of all rounds, which are not kept
    return both | {rate: max(row[rate], other[rate]) for rate in _RATES if rate in row}
