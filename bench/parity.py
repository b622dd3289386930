"""python -m bench.parity: how far losses are from the peers that they replace.

A thousand random cases over shapes, temperatures and dtypes, of the drop-in module where there is
one, else of the function. Of each the difference to the peer on the same embeddings, of the value
relative to 1 + |value|, of the gradient relative to its norm (the worst leaf counts); where they
differ by more than rounding, the errors of both against float64 say whose it is.
Writes bench/results/<device>/parity.jsonl.
"""

import random
import statistics

import click
import torch

from bench.results import write
from fastsim.benchmark.accuracy import errors, relative
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES, MEMBERS
from fastsim.benchmark.rivals import RIVALS, ours
from fastsim.benchmark.rivals.rival import UnavailableError

CASE_COUNT = 1000  # of a loss and a peer, an equal share for every dtype
# At least two groups: within one a softmax has nothing to tell apart, its gradient is rounding.
FEWEST_ROWS, MOST_ROWS, MOST_WIDTH = MEMBERS + 1, 96, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What a user imports, as against a formula written out.
PEERS = [rival for rival in RIVALS.values() if rival.drop_in]


def drawn(case, dtype, chance):
    """One random problem of a case: shape, temperature or scale or margin."""
    rows, width = chance.randint(FEWEST_ROWS, MOST_ROWS), 2 * chance.randint(1, MOST_WIDTH // 2)
    options = {}
    if "temperature" in case.options:
        options["temperature"] = 10 ** chance.uniform(-2, 1)
    if "scale" in case.options:
        options["scale"] = 10 ** chance.uniform(0, 2)
    if "margin" in case.options:
        options["margin"] = chance.uniform(0, 2)
    seed = chance.randrange(2**31)
    return case.problem(rows, width, dtype=dtype, seed=seed, **options)


def replaced(case, peer):
    """(name, make(problem)) of what stands in the peer's place."""
    try:
        make = peer.drop_in[case.name]
        make(case.problem(2, 2))
    except (ImportError, AttributeError, KeyError):  # no drop-in of this package, or of this loss
        return f"fastsim.{case.function.__name__}", ours("cpu").call
    return f"fastsim.integrations.{peer.package}", make


def difference(case, peer, make, dtype, chance):
    """(value, gradient, our error, their error) of one random case."""
    problem = drawn(case, dtype, chance)
    mine, theirs = make(problem), peer.call(problem)
    value = step(mine, problem)
    gradients = [leaf.grad for leaf in problem.leaves]
    other = step(theirs, problem)
    apart = max(
        relative(gradient, leaf.grad)
        for gradient, leaf in zip(gradients, problem.leaves, strict=True)
    )
    exact = (errors(call, problem)["gradient error"] for call in (mine, theirs))
    # Relative to 1 + |value|: log(1 + little) is rounded as the 1 is.
    return (value - other).abs().item() / (1 + other.abs().item()), apart, *exact


def compare(case, peer, dtype, count, seed=0):
    """The result row of a pair: median and worst of `count` random cases."""
    chance = random.Random(f"{case.name} {peer.name} {dtype} {seed}")
    name, make = replaced(case, peer)
    found = [difference(case, peer, make, dtype, chance) for _ in range(count)]
    row = {
        "loss": case.name,
        "by": name,
        "peer": peer.name,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": count,
    }
    kinds = ("value", "gradient", "our error", "their error")
    for kind, values in zip(kinds, zip(*found, strict=True), strict=True):
        row |= {f"{kind} median": statistics.median(values), f"{kind} worst": max(values)}
    return row


def pairs():
    """(case, peer) of every loss that a peer on this device has."""
    for peer in PEERS:
        for name in peer.losses:
            try:
                peer.call(CASES[name].problem(2, 2))
            except UnavailableError:
                continue
            yield CASES[name], peer


@click.command()
@click.option("--cases", default=CASE_COUNT, show_default=True)
def main(cases):
    """Compare, print and write."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: threads would wait for each other
    for case, peer in pairs():
        for dtype in DTYPES:
            rows.append(compare(case, peer, dtype, cases // len(DTYPES)))
            cells = (f"{v:.1e}" if isinstance(v, float) else str(v) for v in rows[-1].values())
            click.echo(" ".join(cells))
    torch.set_num_threads(threads)
    click.echo(f"wrote {write('parity', rows, device='cpu', settings={'cases': cases})}")


if __name__ == "__main__":
    main()
