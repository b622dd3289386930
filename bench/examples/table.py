"""The table of the example scripts in bench/README.md."""

from bench.results import read
from bench.tables import NOTHING, markdown


def table(folder):
    """How far the losses of the scripts are apart, by the classes of ours that a script uses."""
    run = read("examples", folder)
    if not run:
        return NOTHING
    about, rows = run
    ran = [row for row in rows if "not measured" not in row]
    groups = {}
    for row in ran:
        groups.setdefault((" with ".join(row["by"]) or "theirs alone", row["mixed"]), []).append(
            row
        )
    lines = [
        [by, mixed, f"{len(held)}", *(f"{max(map(of, held)):.0e}" for of in (_first, _worst))]
        for (by, mixed), held in sorted(groups.items())
    ]
    text = (
        f"{len({row['script'] for row in ran})} of {len({row['script'] for row in rows})} scripts,"
        f" {about['settings']['steps']} steps of {about['settings']['rows']} rows."
    )
    head = ["class of ours", "mixed precision", "scripts", "first step", "any step"]
    failed = (row for row in rows if "not measured" in row)
    left = [f"* `{row['script']}`: {row['not measured']}" for row in failed]
    return "\n\n".join([text, markdown(head, lines, 2), *(["\n".join(left)] if left else [])])


def _first(row):
    """By how much the losses of the first step differ, when nothing was trained yet."""
    theirs, ours = row["theirs"][0], row["ours"][0]
    return abs(theirs - ours) / (1 + abs(theirs))


def _worst(row):
    return row["worst"]
