"""The Triton backend on a GPU: bench/gpu_checks.py holds the checks, every loss once here."""

import pytest
import torch

from bench import gpu_checks
from bench.gpu_checks import OPERANDS, RAGGED, outputs, problem_of
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.cases import CASES
from tests.waiting import no_waiting

if not torch.cuda.is_available():
    pytest.skip("no GPU is visible", allow_module_level=True)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("loss", CASES)
def test_error(loss, operand):
    for shape in ((4096, 4096, 768), RAGGED):
        row = gpu_checks.error(loss, "triton", shape, operand, "cuda")
        assert row["passed"], row


@pytest.mark.parametrize("loss", CASES)
def test_repeats(loss):
    assert gpu_checks.repeats(loss, "triton", "cuda")["passed"]


# Of a leaf that an earlier call has seen, on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("loss", CASES)
def test_captures(loss):
    assert gpu_checks.captures(loss, "triton", "cuda")["passed"]


# Of fastsim/benchmark/cases.py, which keeps the loss over prefixes that it has made.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped")
@pytest.mark.parametrize("loss", CASES)
def test_compiles_whole(loss):
    problem = problem_of(loss, (512, 512, 96), "bfloat16", "cuda")
    call = ours("triton").call(problem)
    plain = outputs(call, problem)
    whole = outputs(torch.compile(call, fullgraph=True), problem)
    for mine, other in zip(whole, plain, strict=True):
        # Where a row has several gradients, each is rounded, or their sum.
        rounding = torch.finfo(mine.dtype).eps * other.abs().max()
        assert (mine - other).abs().max() <= 4 * rounding


@pytest.mark.parametrize("loss", CASES)
def test_no_wait_for_the_device(loss):
    problem = problem_of(loss, (512, 512, 96), "bfloat16", "cuda")
    call = ours("triton").call(problem)
    outputs(call, problem)
    with no_waiting():
        outputs(call, problem)
