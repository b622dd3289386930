"""opcheck of the registered operators, torch.compile(fullgraph=True), autocast."""

import contextlib
import itertools

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import fastsim
from fastsim import scores
from fastsim.backends import get
from fastsim.backends.cpu import one_call, sizes
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.engine import autograd as engine
from fastsim.engine import chosen_rows, log_sum_exp, max_sim, selection, triplets
from fastsim.engine import cosent as ranking
from fastsim.engine.one_call_loss import OneCallLoss
from tests.cases import BY_NAME, CASES, call, inputs, on_backend, takes_backend

COMPILED = tuple(name for name in fastsim.backends() if name != "eager")
BACKENDS = tuple(fastsim.backends())


@pytest.fixture
def recorded(monkeypatch):
    """Every call of an operator of ours while a loss runs: (operator, arguments)."""
    calls = []
    # A small loss is no operator, but where something traces.
    monkeypatch.setattr(OneCallLoss, "serves", lambda *_: False)
    for serves in ("serves_further", "leaves_further"):
        monkeypatch.setattr(CpuBackend, serves, lambda *_: False)

    def record(module, name):
        operator = getattr(module, name)

        def wrapper(*arguments):
            calls.append((operator.operator, arguments))
            return operator(*arguments)

        monkeypatch.setattr(module, name, wrapper)

    for module, names in (
        (engine, ("_tile", "_tile_backward")),
        (scores, ("_unit_rows", "_unit_rows_backward")),
        (scores, ("_paired_cosines", "_paired_cosines_backward")),
        (log_sum_exp, ("_guide_cosines",)),
        (selection, ("_closest", "_hardest", "_centred")),
        (
            chosen_rows,
            ("_chosen_rows", "_chosen_rows_backward", "_row_terms", "_row_terms_backward"),
        ),
        (ranking, ("_cosent",)),
        (triplets, ("_triplets",)),
        (max_sim, ("_max_sim", "_max_sim_backward")),
    ):
        for name in names:
            record(module, name)
    return calls


# Calls of operators that have passed `opcheck`, which looks at no values: most losses make the same
# calls for their rows, and each takes a tenth of a second to check.
CHECKED = set()


def described(argument):
    """What `opcheck` sees of an argument: all but the values of a tensor."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride()
    return repr(argument)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("case", [*filter(takes_backend, CASES)], ids=repr)
def test_opcheck(case, backend, recorded, usable):
    usable(backend)
    tensors, others, options = inputs(case, (5, 7, 4), torch.float32, seed=21)
    call(case.loss, tensors, others, options | {"backend": backend})
    assert recorded
    for operator, arguments in recorded:
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        call_made = (operator, *map(described, plain))
        if call_made not in CHECKED:
            opcheck(operator, plain)
            CHECKED.add(call_made)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("learnt", ["x", "y", "scale"])
def test_opcheck_of_one_gradient(learnt, backend, recorded, usable):
    usable(backend)
    tensors = {"x": torch.randn(6, 4), "y": torch.randn(7, 4), "scale": torch.tensor(0.3)}
    tensors[learnt].requires_grad_()
    x, y, scale = tensors.values()
    fastsim.info_nce(x, y, temperature=scale, backend=backend)
    fastsim.siglip(x, y, scale=scale, backend=backend)
    assert len(recorded) == 2
    for operator, arguments in recorded:
        opcheck(operator, [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments])


def graph_free(case, backend):
    """Whether distinct labels or targets decide a shape, which cannot be traced."""
    return case.name in ("cosent_matrix-soft", "cosent_matrix-dot") or (
        backend == "eager" and "cosent" in case.name
    )


def traced():
    """Every case on one backend, one case of every loss on the others.

    Which backend it is is an argument of the operators that are traced. That one case has its
    backward pass traced too, as "aot_eager" does; what options change is traced before it.
    """
    first = {case.loss: case for case in reversed(CASES)}
    for case, name in itertools.product(CASES, BACKENDS):
        alone = case is first[case.loss]
        if (name == "cpu" or alone) and not graph_free(case, name):
            yield case, name, "aot_eager" if alone else "eager"


@pytest.mark.parametrize(("case", "backend", "compiler"), [*traced()], ids=str)
def test_compile(case, backend, compiler, usable):
    usable(backend)
    tensors, others, options = inputs(case, (5, 7, 4), torch.float32, seed=22)
    options |= on_backend(case, backend)
    torch._dynamo.reset()
    compiled = torch.compile(case.loss, fullgraph=True, backend=compiler)
    value, grads = call(compiled, tensors, others, options)
    wanted, wanted_grads = call(case.loss, tensors, others, options)
    torch.testing.assert_close(value, wanted)
    for grad, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [c for c, *how in traced() if how == ["cpu", "aot_eager"]], ids=str
)
def test_compile_of_many_rows(case, dtype, monkeypatch, usable):
    """What decides how a large batch is multiplied can be traced too."""
    usable("cpu")
    monkeypatch.setattr(one_call, "SMALL", 0)
    monkeypatch.setattr(sizes, "CHEAP", 0)
    tensors, others, options = inputs(case, (5, 7, 4), dtype, seed=24)
    options |= on_backend(case, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(case.loss, fullgraph=True, backend="eager")
    value, grads = call(compiled, tensors, others, options)
    wanted, wanted_grads = call(case.loss, tensors, others, options)
    torch.testing.assert_close(value, wanted)
    for grad, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("backend", COMPILED)
def test_compile_with_a_tensor_in_several_places(backend, usable):
    usable(backend)
    ids = torch.arange(6)
    sides = [torch.randn(6, 4, requires_grad=True) for _ in "xy"]

    def loss(x, y):
        return fastsim.info_nce(x, y, ids, exclude=(ids, ids), backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*sides), loss(*sides))


@pytest.mark.parametrize("within", [None, "cpu", "auto"])
@pytest.mark.parametrize("name", ["info_nce", "full_triplet", "nt_xent", "cosent", "angle"])
def test_compile_with_the_default_backend(name, within, usable):
    """As most calls are: without `backend`, inside `use_backend` or not."""
    usable("cpu")
    case = BY_NAME[name]
    tensors, others, options = inputs(case, (5, 7, 4), torch.float32, seed=25)
    torch._dynamo.reset()
    compiled = torch.compile(case.loss, fullgraph=True, backend="aot_eager")
    with contextlib.nullcontext() if within is None else fastsim.use_backend(within):
        value, grads = call(compiled, tensors, others, options)
    wanted, wanted_grads = call(case.loss, tensors, others, options | {"backend": "cpu"})
    assert torch.equal(value, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))


def assert_changes_nothing(changed, case, *given):
    """`changed`, the loss in other surroundings, has the bits of the loss; its value."""
    value, grads = call(changed, *given)
    wanted, wanted_grads = call(case.loss, *given)
    assert torch.equal(value, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    return value


def is_of_a_matrix(case):
    """Whether the loss is one of a matrix of scores, no list of them and no distances."""
    others = (fastsim.cosent, fastsim.angle, fastsim.cosine_regression, fastsim.triplet_margin)
    return case.loss not in others and not case.loss.__name__.startswith("batch_")


def in_dtype(case, tensors, others, options, dtype):
    """The same arguments, their embeddings in the dtype."""
    tensors = [t if t is None else t.to(dtype) for t in tensors]
    if case.loss is fastsim.distill and len(others) > 1:  # of the teacher, else its scores
        others = [t.to(dtype) for t in others]
    if "guide" in options:
        options = options | {"guide": [t.to(dtype) for t in options["guide"]]}
    return tensors, others, options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_autocast_is_the_loss_of_embeddings_in_its_dtype(case, backend, dtype, usable):
    usable(backend)
    given = in_dtype(case, *inputs(case, (9, 11, 6), torch.float32, seed=23), torch.float32)
    given[2].update(on_backend(case, backend))

    def under_autocast(*arguments, **keywords):
        with torch.autocast("cpu", dtype=dtype):
            return case.loss(*arguments, **keywords)

    value, grads = call(under_autocast, *given)
    rounded = in_dtype(case, *given, dtype) if is_of_a_matrix(case) else given
    wanted, wanted_grads = call(case.loss, *rounded)
    assert value.dtype == torch.float32
    assert torch.equal(value, wanted)
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, other.float())


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_autocast_leaves_float64_alone(case):
    given = inputs(case, (9, 11, 6), torch.float64, seed=24)

    def under_autocast(*arguments, **keywords):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(*arguments, **keywords)

    assert_changes_nothing(under_autocast, case, *given)


def assert_refused_with_a_gradient_alone(backend):
    """That a loss does the refused work where, and only where, a gradient is wanted."""
    x, y = torch.randn(5, 4), torch.randn(7, 4)
    fastsim.info_nce(x, y, backend=backend)
    x.requires_grad_()
    with torch.no_grad():
        fastsim.info_nce(x, y, backend=backend)
    with pytest.raises(AssertionError, match="nobody asked for"):
        fastsim.info_nce(x, y, backend=backend).backward()


def refuse(*arguments, **keywords):
    raise AssertionError("gradient work that nobody asked for")


@pytest.mark.parametrize("backend", COMPILED)
def test_no_gradient_work_without_need(backend, usable, in_passes, monkeypatch):
    usable(backend)
    for name in ("fused_pass", "score_grad", "multiply"):
        monkeypatch.setattr(type(get(backend)), name, refuse)
    assert_refused_with_a_gradient_alone(backend)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_gradient_work_without_need_in_one_call(backend, usable, monkeypatch):
    usable(backend)
    kind = type(get(backend))
    original = kind.in_one_call

    def without(self, tile, x, y, scale, bias, weights, needs_grad, *more):
        if needs_grad is not None:
            refuse()
        return original(self, tile, x, y, scale, bias, weights, needs_grad, *more)

    monkeypatch.setattr(kind, "in_one_call", without)
    assert_refused_with_a_gradient_alone(backend)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_checkpoint_changes_nothing(case, backend, reduction, usable):
    """torch.utils.checkpoint lets a backward pass read what was saved once only."""
    usable(backend)
    if reduction == "none" and not case.reduces:
        pytest.skip("a scalar loss")
    tensors, others, options = inputs(case, (5, 7, 4), torch.float32, seed=26)
    options |= on_backend(case, backend)
    options |= {"reduction": reduction} if case.reduces else {}

    def again(*given, **options):
        return checkpoint(case.loss, *given, **options, use_reentrant=False)

    assert_changes_nothing(again, case, tensors, others, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_checkpoint_of_a_gradient_that_is_differentiable(case, backend, usable):
    usable(backend)
    tensors, others, options = inputs(case, (5, 7, 4), torch.float64, seed=27)
    options |= on_backend(case, backend)
    found = []
    for again in (False, True):
        leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
        given = *leaves, *others
        if again:
            value = checkpoint(case.loss, *given, **options, use_reentrant=False)
        else:
            value = case.loss(*given, **options)
        sides = [leaf for leaf in leaves if leaf is not None]
        found.append(torch.autograd.grad(value, sides, create_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
