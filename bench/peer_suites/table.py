"""The table of other packages' tests in bench/README.md."""

from bench.results import read
from bench.tables import NOTHING, markdown

HEAD = ["package", "files run", "tests", "pass with theirs", "pass with ours", "classes of ours"]


def table(folder):
    """Of each package's tests how many pass with theirs and with ours, and where they differ."""
    run = read("peer_suites", folder)
    if not run:
        return NOTHING
    about, rows = run
    packages = {}
    for row in rows:
        packages.setdefault(row["package"], []).append(row)
    lines, differences = [], []
    for package, held in packages.items():
        counted = [row for row in held if "not measured" not in row]
        theirs, ours = (sum(row["passed"][n] for row in counted) for n in (0, 1))
        used = {name for row in counted for name in row["by"]}
        title = f"{package} {about['settings']['checkouts'][package]}"
        total = sum(row["tests"] for row in counted)
        files = f"{len(counted)} of {about['settings']['files'][package]}"
        lines.append([title, files, f"{total}", f"{theirs}", f"{ours}", f"{len(used)}"])
        for row in held:
            if "not measured" in row:
                differences.append(f"* `{row['file']}`: not run, {row['not measured']}")
            differences += [
                f"* `{row['file']}`, `{name}`: {before} with theirs, {after} with ours"
                for name, (before, after, _) in row.get("differ", {}).items()
            ]
    text = "\n".join(differences) or "No test differs."
    return "\n\n".join([markdown(HEAD, lines, 1), text])
