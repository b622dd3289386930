"""python -m bench.parity: how far losses differ from the peers that they replace.

Compares the drop-in module, or if there is none the function, with the peer in a thousand random
cases over shapes, temperatures and dtypes, on the same embeddings. The difference of the value is
relative to 1 + |value|, that of the gradient relative to its norm (the worst leaf counts). If they
differ by more than rounding, the errors of both, relative to the peer in float64, show which one is
off. Writes parity.jsonl in bench/results/<device>, for kernels under Triton's interpreter
parity_kernels.jsonl.
"""

import random

import click
import torch

from bench import kernel_cases
from bench.drop_in_cases import DROP_INS
from bench.results import read, write
from fastsim.benchmark.accuracy import relative
from fastsim.benchmark.baselines import BASELINES, ours
from fastsim.benchmark.baselines.baseline import (
    UnavailableError,
    gpu_or_interpreted,
    interpreted,
)
from fastsim.benchmark.calls import reason, step
from fastsim.benchmark.cases import CASES, MEMBERS
from fastsim.benchmark.results import environment

CASE_COUNT = 1000  # for each loss and peer, an equal share for every dtype
# There are at least two groups: a softmax over a single group has a gradient of rounding errors.
FEWEST_ROWS, MOST_ROWS, MOST_WIDTH = MEMBERS + 1, 96, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter does not compute in bfloat16 ("Debugging Triton", limitations).
INTERPRETED_DTYPES = tuple(dtype for dtype in DTYPES if dtype != torch.bfloat16)
# The packages that a user imports, without formulas written out.
PEERS = [baseline for baseline in BASELINES.values() if baseline.drop_in]
# Packages with kernels that Triton's interpreter can run (TRITON_INTERPRET=1).
KERNELS = [
    baseline for baseline in BASELINES.values() if baseline.unsupported_reason is gpu_or_interpreted
]
INTERPRETED_CASES = 40


def random_problem(case, dtype, generator):
    """A problem of a case with random shape, and random temperature, scale or margin."""
    rows, width = (
        generator.randint(FEWEST_ROWS, MOST_ROWS),
        2 * generator.randint(1, MOST_WIDTH // 2),
    )
    if interpreted():
        width = 2 ** generator.randint(4, 6)  # widths that every kernel serves
    options = {}
    if "temperature" in case.options:
        # The debiased loss of a kernel has terms e^((cos - 1) / temperature) in float32.
        options["temperature"] = 10 ** generator.uniform(
            -1 if "tau_plus" in case.options else -2, 1
        )
    if "scale" in case.options:
        options["scale"] = 10 ** generator.uniform(0, 2)
    if "margin" in case.options:
        # The margin of circle is a cosine; far above 1 the losses are too small for float32.
        options["margin"] = generator.uniform(0, 0.5 if "gamma" in case.options else 2)
    seed = generator.randrange(2**31)
    return case.problem(rows, width, dtype=dtype, seed=seed, **options)


def replacement(case, peer):
    """(name, make(problem)) of fastsim's loss in place of the peer's, or None."""
    try:
        make = peer.drop_in[case.name]
        make(case.problem(FEWEST_ROWS, 16))
    except (ImportError, AttributeError, KeyError):  # this package or this loss has no drop-in
        if case.function is None:
            return None
        return f"fastsim.{case.function.__name__}", ours("cpu").call
    return getattr(peer, "by", f"fastsim.integrations.{peer.package}"), make


def exact(case, peer):
    """make(problem) of the loss that is exact in float64: the peer, or for kernels the formula."""
    if isinstance(peer, kernel_cases.KernelBaseline):
        return peer.truth
    return BASELINES["eager torch"].call if peer in KERNELS else peer.call


def outputs(make, problem):
    """[loss, gradient of each leaf]."""
    return [step(make(problem), problem), *(leaf.grad for leaf in problem.leaves)]


def differences(result, expected):
    """(difference of the losses, largest difference of the gradients) of two `outputs`.

    The former is relative to 1 + |loss|, the latter to the norm of the gradient.
    """
    value, *gradients = result
    expected_value, *expected_gradients = (tensor.double() for tensor in expected)
    # Relative to 1 too, since log(1 + x) for a small x is rounded like 1.
    value_difference = (value.double() - expected_value).abs() / (1 + expected_value.abs())
    return value_difference.item(), max(map(relative, gradients, expected_gradients))


def compare_once(case, peer, make, dtype, generator):
    """(value, gradient, error of our gradient, error of theirs) of one random problem."""
    problem = random_problem(case, dtype, generator)
    try:
        theirs = outputs(peer.call, problem)
    except Exception as error:  # of any kind, such as for a dtype that it does not serve
        raise UnavailableError(reason(error)) from error
    mine = outputs(make, problem)
    truth = outputs(exact(case, peer), problem.to(torch.float64))
    return *differences(mine, theirs), differences(mine, truth)[1], differences(theirs, truth)[1]


def compare(case, peer, dtype, count, seed=0):
    """The result row of a loss and a peer: median and worst of `count` cases, or a reason."""
    generator = random.Random(f"{case.name} {peer.name} {dtype} {seed}")
    name, make = replacement(case, peer)
    row = {
        "loss": case.name,
        "by": name,
        "peer": peer.name,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": count,
    }
    try:
        problems = [compare_once(case, peer, make, dtype, generator) for _ in range(count)]
    except UnavailableError as error:
        return row | {"not measured": str(error)}
    kinds = ("value", "gradient", "our error", "their error")
    for kind, values in zip(kinds, torch.tensor(problems, dtype=torch.float64).T, strict=True):
        # The maximum of values with a NaN is NaN.
        row |= {f"{kind} median": values.nanmedian().item(), f"{kind} worst": values.max().item()}
    return row


def pairs():
    """Yields (case, peer) of every loss of an installed peer that fastsim replaces."""
    peers = KERNELS if interpreted() else PEERS
    known = [(CASES[name], peer) for peer in peers for name in peer.losses]
    for case, peer in (*known, *(kernel_cases.PAIRS if interpreted() else DROP_INS)):
        try:
            peer.call(case.problem(FEWEST_ROWS, 16))
        except UnavailableError:
            continue
        if replacement(case, peer):
            yield case, peer


@click.command()
@click.option(
    "--cases",
    type=int,
    help=f"Cases of each loss and peer. Default: {CASE_COUNT}, for kernels {INTERPRETED_CASES}.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
def main(cases, resume):
    """Compare, print and write; under TRITON_INTERPRET=1 for the kernels of GPU packages."""
    cases = cases or (INTERPRETED_CASES if interpreted() else CASE_COUNT)
    name = "parity_kernels" if interpreted() else "parity"
    about, rows = environment("cpu", {"cases": cases}), []
    if resume and (before := read(name, about["device"])):
        about, rows = before
    known = {(row["loss"], row["peer"], row["dtype"]) for row in rows}
    dtypes = INTERPRETED_DTYPES if interpreted() else DTYPES
    torch.set_num_threads(1)  # small tensors: threads would wait for each other
    for case, peer in pairs():
        for dtype in dtypes:
            if (case.name, peer.name, str(dtype).removeprefix("torch.")) in known:
                continue
            rows.append(compare(case, peer, dtype, about["settings"]["cases"] // len(dtypes)))
            cells = (f"{v:.1e}" if isinstance(v, float) else str(v) for v in rows[-1].values())
            click.echo(" ".join(cells))
            path = write(name, rows, about)
    click.echo(f"wrote {path}" if len(rows) > len(known) else "nothing was left to compare")


if __name__ == "__main__":
    main()
