"""python -m bench.parity: how far losses are from the peers that they replace.

A thousand random cases over shapes, temperatures and dtypes, of the drop-in module where there is
one, else of the function. Of each the difference to the peer on the same embeddings, of the value
relative to 1 + |value|, of the gradient relative to its norm (the worst leaf counts); where they
differ by more than rounding, the errors of both against the peer in float64 say whose it is.
Writes bench/results/<device>/parity.jsonl, of kernels under Triton's interpreter
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

CASE_COUNT = 1000  # of a loss and a peer, an equal share for every dtype
# At least two groups: within one a softmax has nothing to tell apart, its gradient is rounding.
FEWEST_ROWS, MOST_ROWS, MOST_WIDTH = MEMBERS + 1, 96, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter does not compute in bfloat16 ("Debugging Triton", limitations).
INTERPRETED_DTYPES = tuple(dtype for dtype in DTYPES if dtype != torch.bfloat16)
# What a user imports, as against a formula written out.
PEERS = [baseline for baseline in BASELINES.values() if baseline.drop_in]
# Of other packages their kernels, where Triton's interpreter runs them: TRITON_INTERPRET=1.
KERNELS = [
    baseline for baseline in BASELINES.values() if baseline.unsupported_reason is gpu_or_interpreted
]
INTERPRETED_CASES = 40


def drawn(case, dtype, chance):
    """One random problem of a case: shape, temperature or scale or margin."""
    rows, width = chance.randint(FEWEST_ROWS, MOST_ROWS), 2 * chance.randint(1, MOST_WIDTH // 2)
    if interpreted():
        width = 2 ** chance.randint(4, 6)  # what every kernel takes
    options = {}
    if "temperature" in case.options:
        # The debiased loss of a kernel has terms e^((cos - 1) / temperature) in float32.
        options["temperature"] = 10 ** chance.uniform(-1 if "tau_plus" in case.options else -2, 1)
    if "scale" in case.options:
        options["scale"] = 10 ** chance.uniform(0, 2)
    if "margin" in case.options:
        # That of circle is one of cosines; far above 1 its losses are too small for float32.
        options["margin"] = chance.uniform(0, 0.5 if "gamma" in case.options else 2)
    seed = chance.randrange(2**31)
    return case.problem(rows, width, dtype=dtype, seed=seed, **options)


def replaced(case, peer):
    """(name, make(problem)) of what stands in the peer's place, or None where nothing does."""
    try:
        make = peer.drop_in[case.name]
        make(case.problem(FEWEST_ROWS, 16))
    except (ImportError, AttributeError, KeyError):  # no drop-in of this package, or of this loss
        if case.function is None:
            return None
        return f"fastsim.{case.function.__name__}", ours("cpu").call
    return getattr(peer, "by", f"fastsim.integrations.{peer.package}"), make


def exact(case, peer):
    """make(problem) of what is right in float64: the peer, for kernels the dense formula."""
    if isinstance(peer, kernel_cases.KernelBaseline):
        return peer.truth
    return BASELINES["eager torch"].call if peer in KERNELS else peer.call


def outputs(make, problem):
    """[loss, gradient of each leaf]."""
    return [step(make(problem), problem), *(leaf.grad for leaf in problem.leaves)]


def apart(found, wanted):
    """(of the values, relative to 1 + |value|; the largest of the gradients, to their norm)."""
    value, *gradients = found
    truth, *others = wanted
    # log(1 + little) is rounded as the 1 is.
    of_value = ((value.double() - truth.double()).abs() / (1 + truth.double().abs())).item()
    return of_value, max(map(relative, gradients, others))


def difference(case, peer, make, dtype, chance):
    """(value, gradient, our gradient's error, theirs) of one random case."""
    problem = drawn(case, dtype, chance)
    try:
        theirs = outputs(peer.call, problem)
    except Exception as error:  # of any kind: a dtype that it does not take
        raise UnavailableError(reason(error)) from error
    mine = outputs(make, problem)
    truth = outputs(exact(case, peer), problem.to(torch.float64))
    return *apart(mine, theirs), apart(mine, truth)[1], apart(theirs, truth)[1]


def compare(case, peer, dtype, count, seed=0):
    """The result row of a pair: median and worst of `count` random cases, or the peer's refusal."""
    chance = random.Random(f"{case.name} {peer.name} {dtype} {seed}")
    name, make = replaced(case, peer)
    row = {
        "loss": case.name,
        "by": name,
        "peer": peer.name,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": count,
    }
    try:
        found = [difference(case, peer, make, dtype, chance) for _ in range(count)]
    except UnavailableError as error:
        return row | {"not measured": str(error)}
    kinds = ("value", "gradient", "our error", "their error")
    for kind, values in zip(kinds, torch.tensor(found, dtype=torch.float64).T, strict=True):
        # A NaN counts as the worst.
        row |= {f"{kind} median": values.nanmedian().item(), f"{kind} worst": values.max().item()}
    return row


def pairs():
    """(case, peer) of every loss of a peer that is here and that something stands in for."""
    peers = KERNELS if interpreted() else PEERS
    known = [(CASES[name], peer) for peer in peers for name in peer.losses]
    for case, peer in (*known, *(kernel_cases.PAIRS if interpreted() else DROP_INS)):
        try:
            peer.call(case.problem(FEWEST_ROWS, 16))
        except UnavailableError:
            continue
        if replaced(case, peer):
            yield case, peer


@click.command()
@click.option("--cases", type=int, help=f"{CASE_COUNT}, of kernels {INTERPRETED_CASES} by default")
@click.option("--resume", is_flag=True, help="go on where a run was broken off")
def main(cases, resume):
    """Compare, print and write; under TRITON_INTERPRET=1 the kernels of GPU packages."""
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
