"""python -m bench.peer_suites FOLDER: the tests of other packages, with our losses in their place.

FOLDER holds checkouts of sentence-transformers, pytorch-metric-learning and open_clip under these
names. Every test file of their losses and miners runs twice with the package that is installed, as
it is and with our classes wherever the package names its own, each in a process of its own. Models
and data sets that the tests would download are stand-ins (bench/examples/stand_ins.py). Writes what
passes with which to bench/results/<device>/peer_suites.jsonl.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import click

from bench.forks import forked
from bench.results import read, write

ROOT = Path(__file__).parents[2]
LONGEST = 110  # seconds of the processor, of a test file
SUITES = {
    "sentence-transformers": (
        "sentence_transformers",
        ("tests/sentence_transformer/losses", "tests/multi_vector_encoder/losses"),
    ),
    "pytorch-metric-learning": ("pytorch_metric_learning", ("tests/losses", "tests/miners")),
    "open_clip": ("open_clip", ("tests/test_*loss*.py",)),
}
FALLBACK = re.compile(r"(\w+): (.*); .* own code computes it")


class Outcomes:
    """A plugin of pytest: what came of every test, and which of ours said that theirs computes."""

    def __init__(self):
        self.outcomes, self.errors, self.said = {}, {}, set()

    def pytest_runtest_logreport(self, report):
        if report.outcome == "failed" or report.when == "call" or report.skipped:
            name = report.nodeid.partition("::")[2]
            if self.outcomes.get(name) != "failed":
                self.outcomes[name] = report.outcome
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = str(crash.message if crash else report.longrepr)
                self.errors[name] = " ".join(message.split())[:300]

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes["collection"] = "failed"
            self.errors["collection"] = " ".join(str(report.longrepr).split())[-300:]

    def pytest_warning_recorded(self, warning_message):
        if found := FALLBACK.search(str(warning_message.message)):
            self.said.add(f"{found[1]}: {found[2]}")


def tested(checkout, package, path, ours):
    """The outcome of each test of a file, the errors, and of ours what was used."""
    import pytest

    from bench.peer_suites import stand_ins
    from bench.peer_suites.swap import swap

    stand_ins.of(package)
    made = swap(package) if ours else set()
    # A folder `tests` is here too: theirs has to be found.
    sys.path[:] = [str(checkout), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    os.chdir(checkout)
    seen = Outcomes()
    options = ["-q", "-p", "no:cacheprovider", "-W", "default"]
    pytest.main([*options, f"--rootdir={checkout}", str(path)], plugins=[seen])
    return {
        "outcomes": seen.outcomes,
        "errors": seen.errors,
        "by": sorted(made),
        "not fused": sorted(seen.said),
    }


def compared(checkout, package, path):
    """What a test file says of theirs and of ours."""
    log = os.environ.get("SUITES_LOG", os.devnull)
    theirs, ours = (
        forked(tested, checkout, package, path, which, seconds=LONGEST, log=log)
        for which in (False, True)
    )
    for name, seen in (("as it is", theirs), ("with ours", ours)):
        if "not measured" in seen:
            return {"not measured": f"{name}: {seen['not measured']}"}
    before, after = theirs["outcomes"], ours["outcomes"]
    tests = sorted(before | after)
    counts = [sum(o == "passed" for o in each.values()) for each in (before, after)]
    row = {"tests": len(tests), "passed": counts, "by": ours["by"], "not fused": ours["not fused"]}
    failed = {name: theirs["errors"].get(name) for name in tests if before.get(name) == "failed"}
    row["failed with theirs"] = failed
    row["differ"] = {
        name: [
            before.get(name, "missing"),
            after.get(name, "missing"),
            ours["errors"].get(name, ""),
        ]
        for name in tests
        if before.get(name) != after.get(name)
    }
    return row


def described(checkout):
    """The commit of a checkout, "" where git does not say."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--tags"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def files(checkout, patterns):
    for pattern in patterns:
        found = checkout / pattern
        yield from sorted(found.glob("test_*.py") if found.is_dir() else checkout.glob(pattern))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="test files whose path has this")
@click.option("--resume", is_flag=True, help="go on where a run was broken off")
@click.option("--out", default="peer_suites", show_default=True, help="name of the result file")
def main(folder, only, resume, out):
    """Run, print and write."""
    # Read when packages are imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TEST_DEVICE": "cpu"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import torch

    from bench.peer_suites import stand_ins
    from fastsim.benchmark.results import environment

    torch.set_num_threads(1)
    present = {name: each for name, each in SUITES.items() if (folder / name).is_dir()}
    checkouts = {name: described(folder / name) for name in present}
    about, rows = environment("cpu", {"checkouts": checkouts}), []
    if resume and (before := read(out, about["device"])):
        rows = before[1]
    known = {(row["package"], row["file"]) for row in rows}
    for name, (package, patterns) in present.items():
        checkout = (folder / name).resolve()
        wanted = [path for path in files(checkout, patterns) if only in str(path)]
        wanted = [p for p in wanted if (name, str(p.relative_to(checkout))) not in known]
        if wanted:
            stand_ins.imported(package, checkout)  # before the forks, once for all
        for path in wanted:
            row = {"package": name, "file": str(path.relative_to(checkout))}
            row |= compared(checkout, package, path)
            rows.append(row)
            said = row.get("not measured") or (row["passed"], row["by"], row["differ"])
            click.echo(f"{row['file']}: {said}")
            write(out, rows, about)


if __name__ == "__main__":
    main()
