"""The table of the example scripts in bench/README.md."""

from bench.results import read
from bench.tables import NOTHING, markdown

NOT_RUN = "not run"


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
        [by, mixed, f"{len(held)}", f"{max(row['worst'] for row in held):.0e}"]
        for (by, mixed), held in sorted(groups.items())
    ]
    text = (
        f"{len({row['script'] for row in ran})} of {len({row['script'] for row in rows})} scripts,"
        f" {about['settings']['steps']} steps of {about['settings']['rows']} rows."
    )
    failed = [row for row in rows if row.get("not measured", NOT_RUN) != NOT_RUN]
    if len(ran) + len(failed) < len(rows):
        text += f" {len(rows) - len(ran) - len(failed)} were not run yet."
    head = ["class of ours", "mixed precision", "scripts", "largest difference of a loss"]
    left = [f"* `{row['script']}`: {row['not measured']}" for row in failed]
    return "\n\n".join([text, markdown(head, lines, 2), *(["\n".join(left)] if left else [])])
