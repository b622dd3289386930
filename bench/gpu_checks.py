"""Checks that a loss is correct and repeatable on a GPU, like tests/backends/triton/test_gpu.py."""

import contextlib
from dataclasses import replace

import torch

from fastsim.benchmark.accuracy import relative
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES
from fastsim.verify import rounding

# name -> (dtype of the embeddings, torch's precision of float32 products)
OPERANDS = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
}
RAGGED = (1001, 1537, 100)  # anchors, candidates, width
# Losses whose dense formula exceeds the memory; the torch backend takes its place.
IN_PANELS = ("cosent_matrix", "batch_hard_triplet")
# These losses compare scores to select some. Rounding may change the selection, so the gradients of
# 16-bit inputs are not checked. A guide selects among all scores, some of which are always close,
# so there the gradients of float32 inputs are not checked either.
SELECTING = ("full_triplet", "batch_hard_triplet")
GUIDED = "info_nce guided"
CAPTURED = 512  # rows of a captured call


@contextlib.contextmanager
def precision(operand):
    """A context in which torch's float32 products have the precision of the operand."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(OPERANDS[operand][1])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def narrowed(problem, rows):
    """The problem with the first rows of x and all of y, if it is one over scores of two sides."""
    if not problem.case.products[0] or len(problem.leaves) != 2:
        return problem
    x, y = problem.leaves
    x = x.detach()[:rows].clone().requires_grad_()

    def cut(place, value):
        if isinstance(value, tuple):  # groups of both sides
            return value[0][:rows], value[1]
        return value[:rows] if place in problem.case.row_arguments else value

    arguments = tuple(cut(place, value) for place, value in enumerate(problem.arguments))
    return replace(problem, leaves=[x, y], arguments=arguments)


def fresh():
    """A new random seed."""
    return torch.seed() % 2**31


def problem_of(loss, shape, operand, device, seed=None):
    """A `Problem` of shape (rows, columns, width); without a seed with fresh inputs."""
    rows, columns, width = shape
    seed = fresh() if seed is None else seed
    dtype = OPERANDS[operand][0]
    problem = CASES[loss].problem(columns, width, device=device, dtype=dtype, seed=seed)
    return narrowed(problem, rows)


def outputs(call, problem):
    """[loss, gradient of each leaf]."""
    return [step(call, problem), *(leaf.grad for leaf in problem.leaves)]


def row_of(measure, loss, backend, operand, **more):
    """The entries of every row of a check."""
    row = {"measure": measure, "loss": loss, "implementation": f"fastsim {backend}"}
    return row | {"dtype": operand} | more


def error(loss, backend, shape, operand, device):
    """The row of the errors relative to float64, of the backend and of the dense formula.

    The check passes if no error exceeds twice the sum of the formula's error, a rounding of the
    operands (`fastsim.verify.rounding`), and the change that such a rounding makes: the formula's
    error is a single sample of it, which may be small by chance.
    """
    formula = ours("torch" if loss in IN_PANELS else "eager")
    seed = fresh()
    problem = problem_of(loss, shape, operand, device, seed)
    exact = problem.to(torch.float64)
    with precision(operand):
        results = outputs(ours(backend).call(problem), problem)
        dense = outputs(formula.call(problem), problem)
        size = rounding.relative(OPERANDS[operand][0], shape[2])
    truth = outputs(formula.call(exact), exact)
    changed = rounding.rounded(problem, size, draw=0).to(torch.float64)
    moved = outputs(formula.call(changed), changed)
    errors = [
        [relative(result, true) for result in (mine, theirs, other)]
        for mine, theirs, other, true in zip(results, dense, moved, truth, strict=True)
    ]
    is_16_bit = OPERANDS[operand][0].itemsize == 2
    loss_alone = loss == GUIDED or (loss in SELECTING and is_16_bit)
    checked = errors[:1] if loss_alone else errors
    (loss_error, dense_loss_error, _), *gradients = errors
    place = dict(zip(("rows", "columns", "width"), shape, strict=True))
    return row_of("error", loss, backend, operand, **place) | {
        "seed": seed,
        "options": problem.options,
        "loss error": loss_error,
        "gradient error": max(error for error, _, _ in gradients),
        "formula's loss error": dense_loss_error,
        "formula's gradient error": max(dense_error for _, dense_error, _ in gradients),
        "passed": all(
            error <= 2 * (dense_error + size + change) for error, dense_error, change in checked
        ),
    }


def repeats(loss, backend, device):
    """The row that says whether two runs agree bit for bit."""
    problem = problem_of(loss, RAGGED, "bfloat16", device)
    call = ours(backend).call(problem)
    first, second = outputs(call, problem), outputs(call, problem)
    same = all(map(torch.equal, first, second))
    return row_of("repeats", loss, backend, "bfloat16", passed=same)


def captures(loss, backend, device, width=768):
    """The row that says whether a captured run, on other inputs, equals a plain run."""
    if device != "cuda":
        raise UnavailableError("CUDA graphs need a GPU")
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
    """The row of a check as the rows of a task."""
    return [check(*arguments)]
