"""The kernels in the emulator: the losses through the backend, and mutants that it has to catch."""

import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.backends.cuda.emulator import build, mutants

ORDERS = [str(order) for order in range(1, 7)]  # of emulator/machine.h: late, then random
ENGINES = ("portable", "hopper")
PARTS = (0, 1)  # of the suite


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all processes of this run have in common."""
    return tmp_path_factory.getbasetemp().parent


def test_losses(shared):
    """test_emulated.py in processes of its own, one an engine: conftest.py says why."""
    library = build.once(shared, "emulated", build.library) / "emulated.so"
    tests = build.ROOT / "tests/backends/cuda/test_emulated.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]

    def run(engine):
        emulated = {"FASTSIM_EMULATED": str(library), "FASTSIM_EMULATED_ENGINE": engine}
        return subprocess.run(command, env=os.environ | emulated, capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run, ENGINES):
            assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
            assert " passed" in done.stdout


@pytest.fixture(scope="session")
def parts(shared):
    return build.once(shared, "suite", build.suite_parts)


@pytest.fixture(scope="session")
def right(parts, shared):
    """{(engine, part of the suite): what it prints without a mutant, in every order}."""
    lines = {}
    for key in itertools.product(ENGINES, PARTS):
        program = build.suite(parts, parts / "right", *key)
        done = subprocess.run([program, "", "0", *ORDERS], capture_output=True, text=True)
        (lines[key],) = set(done.stdout.split("\n")[:-1])
        assert lines[key].isdigit()
    return lines


def test_every_mutant_is_caught(parts, right, tmp_path):
    """In few programs, which choose one as they start: compilation is what costs."""

    def shows(program, wanted, number, orders=ORDERS):
        chosen = os.environ | {"FASTSIM_MUTANT": str(number)}
        try:
            done = subprocess.run([program, wanted, *orders], env=chosen, timeout=120)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 1

    def survivors(pack):
        def change(name, text):
            mine = {number: mutant for number, mutant in pack.items() if mutant.file == name}
            return mutants.apply_all(mine, text)

        left = dict(pack)
        for part, engine in itertools.product(PARTS, ENGINES):
            tried = [n for n, mutant in left.items() if mutant.engine in (engine, "either")]
            if not tried:
                continue
            program = build.suite(parts, tmp_path / str(min(pack)), engine, part, change)
            wanted = right[engine, part]
            assert not shows(program, wanted, -1, ORDERS[:1])  # none
            for number in tried:
                if shows(program, wanted, number):
                    del left[number]
        return left.values()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(survivors, mutants.packs(mutants.MUTANTS, build.texts()))
        assert not list(itertools.chain(*found))


# What orders threads, copies and products.
CALLS = r"""(?x) \b(barrier_(wait|expect|init_fence)|bulk_(fence|store_(commit|read|wait))
    |group_product_(begin|commit|wait<\d>)|group_(sync|arrive)|cluster_sync|copy_async_(wait|commit)
    |block_sync|sync|acquire_staging|release|await_turn|pass_turn)\([^{]*?;"""


@pytest.mark.parametrize("file", build.MUTABLE)
def test_every_call_has_a_mutant(file):
    text = (build.KERNELS / file).read_text()
    changed = set()
    for mutant in mutants.MUTANTS:
        if mutant.file == file:
            start = mutant.start(text)
            changed |= set(range(start, start + len(mutant.old)))
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    calls = list(re.finditer(CALLS, code))
    assert calls
    assert [match[0] for match in calls if match.start() not in changed] == []
