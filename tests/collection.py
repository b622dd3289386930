"""Which of the collected tests run, and in which order: those that this machine can, long first.

A test of a backend that is not usable here is left out at collection, with one line that says why.
`pytest -m quick` keeps every loss on every usable backend, each of them once a test function.

A test that is marked `covering("case", "backend", "dtype", "shape", step=4)` runs those
combinations of its parameters whose places add up to a multiple of the step. With as many dtypes
and shapes as the step, each case has every pair of backend and dtype, and every pair of backend and
shape; which dtype meets which shape goes round with the cases. `--full` runs them all.
"""

from collections import Counter, defaultdict

import pytest
import torch

import fastsim
from fastsim.backends import get
from tests.seeds import SEED

# Folders of quick tests; the others start processes, train or compile.
QUICK = ("losses", "engine")
SLOW = (
    "test_memory",
    "test_gradients",
    "test_derivatives",
    "test_export",
    "test_torch_integration",
    "test_seeds",
    "test_sweep",
)

# Files of few tests that compile, or start processes that do. With `pytest -n` they come first, so
# that no process is left with one of them when the others are done.
LONG = (
    *("backends/triton", "backends/cuda", "backends/torch/test_compiled", "distributed"),
    *("test_examples", "test_packaging", "test_readme_blocks", "training", "verify"),
    *("engine/test_torch_integration", "losses/test_memory", "losses/test_losses"),
)


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="every combination, also of tests marked `covering`"
    )


def pytest_configure(config):
    """`--dist loadfile` else takes files of many tests first, which are the short ones."""
    config.option.loadscopereorder = False


def longest_first(items):
    def is_short(item):
        return not any(f"tests/{name}" in item.path.as_posix() for name in LONG)

    return sorted(items, key=is_short)


def reasons():
    """{backend: why it cannot serve the tests' tensors, which are on the CPU, or None}."""
    found = fastsim.backends()
    for name in found:
        if found[name] is None and get(name).unsupported_reason(torch.empty(1)) is not None:
            found[name] = f"of tensors on the CPU; on a GPU: tests/backends/{name}/test_gpu.py"
    return found


def covering(items):
    """(tests to keep, tests to leave out): of those marked `covering` some stand for all."""
    kept, left_out = [], []
    places = defaultdict(dict)  # of the values of each parameter, in the order of the tests
    for item in items:
        mark = item.get_closest_marker("covering")
        total = 0
        for name in mark.args if mark else ():
            seen = places[item.path, item.originalname, name]
            total += seen.setdefault(id(item.callspec.params[name]), len(seen))
        (left_out if mark and total % mark.kwargs["step"] else kept).append(item)
    return kept, left_out


def backend_of(item):
    """The name of the backend that a collected test asks for, or None."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name = parameters.get("backend")
    return name if isinstance(name, str) else None


def unusable(items, why):
    """(tests to keep, tests to leave out) by the reasons {backend: None or a sentence}."""
    kept, left_out = [], []
    for item in items:
        reason = why.get(backend_of(item)) or without_kernels(item)
        (left_out if reason else kept).append(item)
    return kept, left_out


def without_kernels(item):
    """Why the backend of a collected test cannot serve its case's kind of loss, or None."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    name, kind = backend_of(item), getattr(case, "kind", None)
    if name not in fastsim.backends():
        return None
    if reason := get(name).unsupported_extra(getattr(case, "extras", ())):
        return reason
    return get(name).unsupported_kind(kind) if kind else None


def mark_quick(items):
    """Marks one test of every function, loss and backend as quick."""
    seen = set()
    # The order is arbitrary but fixed, so that shapes and dtypes alternate.
    for item in sorted(items, key=lambda item: hash_of(item.nodeid)):
        folder, stem = item.path.parent.name, item.path.stem
        if folder not in QUICK or stem in SLOW:
            continue
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        key = item.path, item.originalname, repr(parameters.get("case")), backend_of(item)
        if key not in seen:
            seen.add(key)
            item.add_marker(pytest.mark.quick)


def hash_of(text):
    """A number that is the same in every process."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) % 1009


def pytest_collectstart(collector):
    """What a file of tests draws when it is imported follows the seed as well, and not the files
    that were imported before it.
    """
    if isinstance(collector, pytest.Module):
        torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    why = reasons()
    kept, left_out = unusable(items, why)
    counts = Counter(map(backend_of, left_out))
    config.left_out = [
        f"{name}: {count} tests, {why[name] or 'of kinds that it has no kernels of'}"
        for name, count in counts.items()
    ]
    if not config.option.full:
        kept, others = covering(kept)
        left_out += others
    config.hook.pytest_deselected(items=left_out)
    items[:] = longest_first(kept)
    mark_quick(items)


def pytest_report_collectionfinish(config):
    return [f"left out: {line}" for line in getattr(config, "left_out", ())]


def pytest_report_header(config):
    """The same of a run in several processes, which collect and do not speak."""
    if not getattr(config.option, "numprocesses", None):
        return []
    why = reasons().items()
    return [f"left out: tests of {name}, {reason}" for name, reason in why if reason]
