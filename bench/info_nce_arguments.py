"""InfoNCE with each of its arguments, alone and beside each other one, on a small batch.

    python -m bench.info_nce_arguments [--rows 64] [--seconds 0.6]

Where no operator serves two arguments at once, the loss takes a pass for each set of scores, and a
small batch spends its time on calls. Times forward + backward in turns in one thread: the `cpu`
backend and the dense formula (`backend="eager"`). Writes info_nce_arguments.jsonl in
bench/results/<device>; rows of other sizes and kernels in the file stay.
"""

import time
from itertools import combinations

import click
import torch

import fastsim
from bench.results import read, write
from bench.tables import from_rows, markdown
from fastsim.backends import get
from fastsim.benchmark import results, timing
from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES, Problem

NAME, WIDTH = "info_nce_arguments", 384
OURS, DENSE = "cpu", "eager"
ALONE = "nothing else"
MOST_ROUNDS = 2000


def _normal(*shape):
    """A function of the number of rows: random numbers (rows, *shape)."""
    return lambda rows: torch.randn(rows, *shape)


# The tensors that get gradients, and other values of arguments, for a number of rows. With
# `temperature` the temperature is learnt; otherwise it is a number.
LEARNT = {"temperature": lambda rows: torch.tensor(0.05), "own_negatives": _normal(4, WIDTH)}
GIVEN = {
    "positives": lambda rows: torch.randperm(rows),
    "exclude": lambda rows: (torch.arange(rows) // 2,) * 2,
    "exclude_above": lambda rows: 0.1,
    "guide": lambda rows: (torch.randn(rows, 64), torch.randn(rows, 64)),
    "candidate_bias": _normal(),
    "margin": lambda rows: 0.1,
    "symmetric": lambda rows: True,
    "references": _normal(WIDTH),
    "directions": lambda rows: ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
    "label_smoothing": lambda rows: 0.1,
}
ARGUMENTS = (*LEARNT, *GIVEN)
CHOICES = ((), *((name,) for name in ARGUMENTS), *combinations(ARGUMENTS, 2))


def problem(names, rows):
    """The inputs of the loss with the named arguments, the same for each call."""
    torch.manual_seed(0)
    learnt = {name: LEARNT[name](rows) for name in names if name in LEARNT}
    options = {"temperature": 0.05} | {name: GIVEN[name](rows) for name in names if name in GIVEN}
    leaves, _ = CASES["info_nce"].make(rows, WIDTH, torch.Generator().manual_seed(0))
    leaves = [leaf.requires_grad_() for leaf in (*leaves, *learnt.values())]
    return Problem(None, leaves, (tuple(learnt),), options)


def call(given, backend):
    """The loss as a function of the leaves of a problem."""
    (learnt,) = given.arguments

    def loss(x, y, *tensors):
        options = given.options | dict(zip(learnt, tensors, strict=True))
        return fastsim.info_nce(x, y, **options, backend=backend)

    return loss


def measured(names, rows, seconds, clock=time.perf_counter):
    """The result rows for the named arguments; none if the loss refuses them together."""
    given = problem(names, rows)
    try:
        call(given, DENSE)(*given.leaves)
    except ValueError:
        return
    functions = {by: runnable(call(given, by), given, "forward + backward") for by in (OURS, DENSE)}
    kernels = get(OURS).note().removeprefix(", ")
    about = {"arguments": list(names), "rows": rows, "width": WIDTH, "kernels": kernels}
    times_by = timing.in_turns(functions, seconds=seconds, most=MOST_ROUNDS, clock=clock)
    for by, times in times_by.items():
        row = about | {"by": by}
        yield row | ({"not measured": times} if isinstance(times, str) else timing.summary(times))


def _place(row):
    return row["kernels"], row["rows"]


def ratios(rows):
    """{place: {arguments: how many times as fast as the dense formula}}."""
    best = {}
    for row in rows:
        if "repeats ms" in row:
            times = best.setdefault(_place(row), {}).setdefault(tuple(row["arguments"]), {})
            times[row["by"]] = min(row["repeats ms"])
    return {
        place: {names: times[DENSE] / times[OURS] for names, times in of_place.items()}
        for place, of_place in best.items()
    }


@from_rows(NAME)
def table(rows):
    """The tables of a device in bench/README.md, one for each size and kernels."""
    parts = []
    for (kernels, count), of_place in ratios(rows).items():
        lines = [[ALONE, *(_cell(of_place, (name,)) for name in ARGUMENTS)]]
        for place, name in enumerate(ARGUMENTS[1:], 1):
            before = ARGUMENTS[:place]
            lines.append([f"`{name}`", *(_cell(of_place, (other, name)) for other in before)])
            lines[-1] += [""] * (len(ARGUMENTS) - place)
        head = ["", *(f"`{name}`" for name in ARGUMENTS)]
        plain = _cell(of_place, ())
        parts.append(f"{count:,} rows, {kernels}; without any of them {plain}:\n")
        parts.append(markdown(head, lines) + "\n")
    return "\n".join(parts).rstrip()


def _cell(of_place, names):
    return f"{of_place[names]:.2f}" if names in of_place else "-"


@click.command()
@click.option("--rows", default=64, show_default=True, help="Rows of each side.")
@click.option("--seconds", default=0.6, show_default=True, help="Time for each choice.")
def main(rows, seconds):
    """Measure and write."""
    about = results.environment("cpu")  # first, as the device's name has the number of threads
    torch.set_num_threads(1)
    new = []
    for names in CHOICES:
        new += measured(names, rows, seconds)
    for of_place in ratios(new).values():
        for names, ratio in of_place.items():
            click.echo(f"{ratio:6.2f} x {' and '.join(names) or ALONE}")
    _, kept = read(NAME, about["device"]) or (None, [])
    place = _place(new[0])
    kept = sorted([row for row in kept if _place(row) != place] + new, key=_place)
    click.echo(write(NAME, kept, about))


if __name__ == "__main__":
    main()
