"""python -m bench.peer_suites FOLDER: the tests of other packages, with our losses in their place.

FOLDER holds checkouts of sentence-transformers, pytorch-metric-learning and open_clip under these
names. The test files of their losses and miners run with the package that is installed (open_clip's
losses are those of the checkout), as it is and with our classes wherever the package names its own,
in processes of their own. Models and data sets that the tests would download are stand-ins
(bench/examples/stand_ins.py). Writes what passes with which to
bench/results/<device>/peer_suites.jsonl.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import click

from bench.forks import forked
from bench.results import read, write
from fastsim.integrations import overrides

ROOT = Path(__file__).parents[2]
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
    """A plugin of pytest: of every file what came of its tests, and what of ours they used.

    made: the names of our classes of which objects were made, as `swap` notes them.
    """

    def __init__(self, made):
        self.made, self.files = made, {}

    def of(self, nodeid):
        new = {"outcomes": {}, "errors": {}, "by": set(), "not fused": set()}
        return self.files.setdefault(nodeid.partition("::")[0], new)

    def pytest_runtest_setup(self, item):
        overrides._warned.clear()  # what is said once is said in every test

    def pytest_runtest_logreport(self, report):
        seen, name = self.of(report.nodeid), report.nodeid.partition("::")[2]
        seen["by"] |= self.made
        self.made.clear()
        if report.failed or report.when == "call" or report.skipped:
            if seen["outcomes"].get(name) != "failed":
                seen["outcomes"][name] = report.outcome
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = str(crash.message if crash else report.longrepr)
                seen["errors"][name] = " ".join(message.split())[:300]

    def pytest_collectreport(self, report):
        if report.failed:
            seen = self.of(report.nodeid)
            seen["outcomes"]["collection"] = "failed"
            seen["errors"]["collection"] = " ".join(str(report.longrepr).split())[-300:]

    def pytest_warning_recorded(self, warning_message, nodeid):
        if found := FALLBACK.search(str(warning_message.message)):
            self.of(nodeid)["not fused"].add(f"{found[1]}: {found[2]}")


def tested(checkout, package, paths, ours):
    """{file: the outcome of each of its tests, the errors, and of ours what was used}."""
    import pytest

    from bench.peer_suites import stand_ins
    from bench.peer_suites.swap import swap

    stand_ins.of(package)
    seen = Outcomes(swap(package) if ours else set())
    # A folder `tests` is here too: theirs has to be found.
    sys.path[:] = [str(checkout), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    os.chdir(checkout)
    options = ["-q", "-p", "no:cacheprovider", "-W", "default", f"--rootdir={checkout}"]
    pytest.main([*options, *map(str, paths)], plugins=[seen])
    sets = ("by", "not fused")
    return {
        name: file | {key: sorted(file[key]) for key in sets} for name, file in seen.files.items()
    }


def compared(checkout, package, paths, seconds):
    """Of every test file what it says of theirs and of ours."""
    log = os.environ.get("SUITES_LOG", os.devnull)
    runs = [
        forked(tested, checkout, package, paths, which, seconds=seconds, log=log)
        for which in (False, True)
    ]
    for path in paths:
        name = str(path.relative_to(checkout))
        row = {"file": name}
        for which, run in zip(("as it is", "with ours"), runs, strict=True):
            if name not in run:
                row["not measured"] = f"{which}: {run.get('not measured', 'no test')}"
        yield row if "not measured" in row else row | differing(*(run[name] for run in runs))


def differing(theirs, ours):
    """The tests of a file: how many pass with which, and those of which something else came."""
    before, after = theirs["outcomes"], ours["outcomes"]
    tests = sorted(before | after)
    pairs = {name: (before.get(name, "missing"), after.get(name, "missing")) for name in tests}
    return {
        "tests": len(tests),
        "passed": [sum(o == "passed" for o in each.values()) for each in (before, after)],
        "by": ours["by"],
        "not fused": ours["not fused"],
        "failed with theirs": {
            name: theirs["errors"].get(name) for name in tests if before.get(name) == "failed"
        },
        "differ": {
            name: [*pair, ours["errors"].get(name, "")]
            for name, pair in pairs.items()
            if pair[0] != pair[1]
        },
    }


def described(checkout):
    """The commit of a checkout, "" where git does not say."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--tags"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def batched(items, size):
    return (items[first : first + size] for first in range(0, len(items), size))


def files(checkout, patterns):
    for pattern in patterns:
        found = checkout / pattern
        yield from sorted(found.glob("test_*.py") if found.is_dir() else checkout.glob(pattern))


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="test files whose path has this")
@click.option("--at-once", type=int, default=12, help="files of which two processes run all tests")
@click.option("--seconds", type=int, default=300, help="of the processor that they may take")
@click.option("--resume", is_flag=True, help="go on where a run was broken off")
@click.option("--out", default="peer_suites", show_default=True, help="name of the result file")
def main(folder, only, at_once, seconds, resume, out):
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
    found = {
        name: list(files((folder / name).resolve(), patterns))
        for name, (_, patterns) in present.items()
    }
    counts = {name: len(paths) for name, paths in found.items()}
    about, rows = environment("cpu", {"checkouts": checkouts, "files": counts}), []
    if resume and (before := read(out, about["device"])):
        rows = before[1]
    known = {(row["package"], row["file"]) for row in rows}
    for name, (package, _) in present.items():
        checkout = (folder / name).resolve()
        wanted = [path for path in found[name] if only in str(path)]
        wanted = [p for p in wanted if (name, str(p.relative_to(checkout))) not in known]
        if wanted:
            stand_ins.imported(package, checkout)  # before the forks, once for all
        for few in batched(wanted, at_once):
            for row in compared(checkout, package, few, seconds):
                rows.append({"package": name} | row)
                said = row.get("not measured") or (row["passed"], row["by"], row["differ"])
                click.echo(f"{row['file']}: {said}")
            write(out, rows, about)


if __name__ == "__main__":
    main()
