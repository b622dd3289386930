"""Whether a loss is right and repeatable on a GPU, as tests/backends/triton/test_gpu.py asks."""

import contextlib
from dataclasses import replace

import torch

from fastsim.benchmark.accuracy import relative
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES
from fastsim.verify import rounding

# Type of the embeddings, and torch's precision of float32 products.
OPERANDS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
}
RAGGED = (1001, 1537, 100)  # anchors, candidates, width
# Whose dense formula holds more than there is memory for: the panels of the torch backend instead.
IN_PANELS = ("cosent_matrix", "batch_hard_triplet")
# Which scores count is decided by comparing them, so rounding may decide otherwise, and the
# gradients of 16-bit inputs are no measure. A guide decides on every score: of so many some are
# always close, and the gradients of float32 are none either.
SELECTING = ("full_triplet", "batch_hard_triplet")
GUIDED = "info_nce guided"
CAPTURED = 512  # rows of a captured call


@contextlib.contextmanager
def precision(operand):
    """Within the block torch's own products of float32 are those of the operand."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(OPERANDS[operand][1])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)


def narrowed(problem, rows):
    """The first rows of x against all of y, where a loss over all scores has two sides."""
    if not problem.case.products[0] or len(problem.leaves) != 2:
        return problem
    x, y = problem.leaves
    x = x.detach()[:rows].clone().requires_grad_()

    def cut(place, value):
        if isinstance(value, tuple):  # groups of both sides
            return value[0][:rows], value[1]
        return value[:rows] if place in problem.case.of_rows else value

    given = tuple(cut(place, value) for place, value in enumerate(problem.arguments))
    return replace(problem, leaves=[x, y], arguments=given)


def fresh():
    """A seed that no run has had."""
    return torch.seed() % 2**31


def problem_of(loss, shape, operand, device, seed=None):
    """Inputs of shape (rows, columns, width), fresh ones unless there is a seed."""
    rows, columns, width = shape
    seed = fresh() if seed is None else seed
    dtype = OPERANDS[operand][0]
    problem = CASES[loss].problem(columns, width, device=device, dtype=dtype, seed=seed)
    return narrowed(problem, rows)


def outputs(call, problem):
    """[loss, gradient of each leaf]."""
    return [step(call, problem), *(leaf.grad for leaf in problem.leaves)]


def row_of(measure, loss, backend, operand, **more):
    """What every row of a check says."""
    who = {"measure": measure, "loss": loss, "implementation": f"fastsim {backend}"}
    return who | {"dtype": operand} | more


def error(loss, backend, shape, operand, device):
    """The row of errors against float64, in norm: the backend's own, and the dense formula's.

    Passed where none is above twice the formula's and a rounding of the operands
    (`fastsim.verify.rounding`).
    """
    formula = ours("torch" if loss in IN_PANELS else "eager")
    seed = fresh()
    problem = problem_of(loss, shape, operand, device, seed)
    exact = problem.to(torch.float64)
    with precision(operand):
        mine = outputs(ours(backend).call(problem), problem)
        dense = outputs(formula.call(problem), problem)
        size = rounding.relative(OPERANDS[operand][0], shape[2])
    truth = outputs(formula.call(exact), exact)
    pairs = [
        [relative(result, t) for result in results]
        for *results, t in zip(mine, dense, truth, strict=True)
    ]
    short = OPERANDS[operand][0].itemsize == 2
    decided = loss == GUIDED or (loss in SELECTING and short)
    judged = pairs[:1] if decided else pairs
    (loss_error, dense_loss_error), *gradients = pairs
    place = dict(zip(("rows", "columns", "width"), shape, strict=True))
    return row_of("error", loss, backend, operand, **place) | {
        "seed": seed,
        "options": problem.options,
        "loss error": loss_error,
        "gradient error": max(own for own, _ in gradients),
        "formula's loss error": dense_loss_error,
        "formula's gradient error": max(theirs for _, theirs in gradients),
        "passed": all(own <= 2 * (theirs + size) for own, theirs in judged),
    }


def repeats(loss, backend, device):
    """The row that says whether two runs agree bit for bit."""
    problem = problem_of(loss, RAGGED, "bfloat16", device)
    call = ours(backend).call(problem)
    first, second = outputs(call, problem), outputs(call, problem)
    same = all(map(torch.equal, first, second))
    return row_of("repeats", loss, backend, "bfloat16", passed=same)


def captures(loss, backend, device, width=768):
    """The row that says whether a captured run gives, on other inputs, what a plain run gives."""
    if device != "cuda":
        raise UnavailableError("CUDA graphs are a GPU's")
    problem = problem_of(loss, (CAPTURED, CAPTURED, width), "bfloat16", device)
    call = ours(backend).call(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(call, problem)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for leaf in problem.leaves:
        leaf.grad = None
    with torch.cuda.graph(graph):
        value = call(*problem.leaves)
        value.backward()
    first = problem.leaves[0]
    with torch.no_grad():
        first.copy_(torch.randn_like(first))
    graph.replay()
    replayed = [value.detach().clone(), *(leaf.grad.clone() for leaf in problem.leaves)]
    same = all(map(torch.equal, replayed, outputs(call, problem)))
    return row_of("captures", loss, backend, "bfloat16", passed=same)


def rows_of(check, *arguments):
    """A check's row as the rows of a task."""
    return [check(*arguments)]
