"""The CUDA backend on a GPU: every loss, dtype and ragged shape once; left out without one."""

import pytest
import torch

import fastsim
from fastsim.backends import backends
from tests.cases import CASES, call, inputs
from tests.measure import assert_close, conditioning
from tests.test_no_waiting import LEVELS
from tests.waiting import no_waiting

if (reason := backends()["cuda"]) is not None:
    pytest.skip(f"cuda: {reason}", allow_module_level=True)

TILES = [case for case in CASES if case.tile]
SHAPES = ((67, 75, 34), (300, 700, 200))


def on_gpu(part):
    """A tensor, or the tensors of a tuple, on the GPU; anything else as it is."""
    if isinstance(part, tuple):
        return tuple(map(on_gpu, part))
    return part.cuda() if isinstance(part, torch.Tensor) else part


def run(case, tensors, others, options, **chosen):
    """(value, gradients) of the mean, on the CPU."""
    leaves = [t if t is None else t.cuda().requires_grad_() for t in tensors]
    options = {k: on_gpu(v) for k, v in options.items()}
    value = case.loss(*leaves, *map(on_gpu, others), **options, **chosen)
    value.backward()
    return value.detach().cpu(), [leaf.grad.cpu() for leaf in leaves if leaf is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_equals_the_formula(case, dtype, shape):
    if case.loss is fastsim.full_triplet and dtype.itemsize == 2:
        pytest.skip("rounding to float16 may choose another of two close negatives")
    tensors, others, options = inputs(case, shape, dtype, seed=sum(shape))
    # Truth and formula from the CPU: cosent_matrix has no dense formula of that size.
    exact = [t if t is None else t.double() for t in tensors]
    formula = [t if t is None else t.float() for t in tensors]

    def results(tensors):
        value, grads = call(case.loss, tensors, others, options | {"backend": "cpu"})
        return [value, *grads]

    truth, *wanted = results(exact)
    dense, theirs = call(case.loss, formula, others, options | {"backend": "cpu"})
    value, grads = run(case, tensors, others, options, backend="cuda")
    rounding = torch.float32 if dtype == torch.float32 else torch.float16
    moved = [torch.finfo(rounding).eps * most for most in conditioning(results, exact)]
    assert_close("value", value, truth, dense, rounding, moved=moved[0])
    for grad, *found, most in zip(grads, wanted, theirs, moved[1:], strict=True):
        assert_close("gradient", grad, *found, dtype, moved=most)


@pytest.mark.parametrize("case", TILES, ids=repr)
def test_repeats(case):
    tensors, others, options = inputs(case, (300, 700, 200), torch.bfloat16, seed=1)
    first, second = (run(case, tensors, others, options, backend="cuda") for _ in "ab")
    assert torch.equal(first[0], second[0])
    assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("case", TILES, ids=repr)
def test_no_wait_for_the_device(case):
    tensors, others, options = inputs(case, (67, 75, 34), torch.float16, seed=1)
    if case.name in LEVELS:  # else they are looked for, and waited for
        options["levels"] = torch.tensor(LEVELS[case.name])
    run(case, tensors, others, options, backend="cuda")
    leaves = [t if t is None else t.cuda().requires_grad_() for t in tensors]
    others, options = [*map(on_gpu, others)], {k: on_gpu(v) for k, v in options.items()}
    with no_waiting():
        case.loss(*leaves, *others, **options, backend="cuda").backward()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    from bench.cuda_sanitizer import sanitize, sanitizer

    if sanitizer() is None:
        pytest.skip("no compute-sanitizer")
    assert sanitize(tool)["passed"]
