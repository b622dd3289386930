"""What a backend is checked at, and what counts as wrong."""

import inspect
import operator
import os
from functools import partial

import pytest
import torch

import fastsim
from fastsim.backends import get, panel
from fastsim.backends.extras import DOT
from fastsim.backends.torch import compiled
from fastsim.backends.triton import backend as triton_backend
from fastsim.backends.triton.kernels import table
from fastsim.engine.one_call import panels_alone
from fastsim.environment import variables
from fastsim.verify import cases, checks
from fastsim.verify.canaries import canaries
from tests.verify import fakes

CPU = torch.device("cpu")


def test_a_backend_is_checked_by_what_it_has(monkeypatch):
    """A problem that needs an extra says so, and is not asked of a backend without it."""
    known = dict(fastsim.backends.__globals__["_BACKENDS"]) | {"bare": fakes.Bare()}
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", known)
    made = cases.problems("softmax", (5, 7, 4), torch.float32)
    asked = checks.supported("bare", "softmax", (5, 7, 4), torch.float32)
    assert [one.name for one in asked] == [one.name for one in made if not one.extras]
    for one in asked:
        assert all(t.isfinite().all() for t in checks.outputs(one, "bare", CPU)) == one.finite


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_an_error_may_be_twice_that_of_the_torch_backend(size, monkeypatch):
    """And two roundings of the largest entry, which of a value is 1 at least."""
    problem = cases.problems("sigmoid", (5, 7, 4), torch.float32)[0]
    right = checks.outputs(problem, "eager", CPU, torch.float64)
    right[0] = size * right[0]
    assert (right[0] < 1) == (size < 1)
    theirs = 2.0**-20
    for place, exact in enumerate(right):
        largest = max(exact.abs().max().item(), 1.0 if place == 0 else 0.0)
        allowed = 2 * (theirs + torch.finfo(torch.float32).eps * largest)
        for error, wrong in ((0.99 * allowed, False), (1.01 * allowed, True), (torch.inf, True)):

            def outputs(problem, backend, device, dtype=None, error=error, place=place):
                found = [part.clone() for part in right]
                if dtype is None:
                    found[place].view(-1)[-1] += theirs if backend == "torch" else error
                return found

            monkeypatch.setattr(checks, "outputs", outputs)
            fault = checks._fault("mine", problem, CPU)
            wanted = "is not finite" if error == torch.inf else "has an error of"
            assert wanted in fault if wrong else fault is None


def test_rows_are_weighed_apart():
    """So that a backend which takes one row's weight for another's is found out."""
    made = cases.problems("sigmoid", (5, 7, 4), torch.float32)
    problem = next(one for one in made if one.name == "of each row")
    _, grad, *_ = checks.outputs(problem, "eager", CPU, torch.float64)
    x, y = (leaf.double().requires_grad_() for leaf in problem.leaves)
    losses = fastsim.siglip(x, y, **problem.options, **problem.learnt, backend="eager")
    wanted = sum((0.5 + row / 4) * loss for row, loss in enumerate(losses))
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, x)[0])


def test_every_way_is_checked(monkeypatch):
    """In one call, in passes, and over several panels."""
    ways = set()

    def fault(*_):
        ways.add((panels_alone(), os.environ.get(panel.VARIABLE) == checks.SMALLEST_PANEL))

    monkeypatch.setattr(checks, "_fault", fault)
    assert checks.faults("torch", "sigmoid", torch.float32, CPU) == []
    assert ways == {(False, False), (True, False), (False, True)}


def wavering(problem, found):
    found[0].mul_(1 + torch.rand(()))


def spilling(problem, found):
    made = torch.empty_like(problem.leaves[0])
    if made.untyped_storage().nbytes() > made.nbytes:  # else it would be someone else's
        made.as_strided((1,), (1,), made.storage_offset() + made.numel()).fill_(1.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(wavering, "gave different results"), (spilling, "it wrote outside of 1 of its tensors")],
)
@pytest.mark.parametrize("name", ["info_nce", "guided positives", "ties"])
def test_calls_of_every_problem_are_tried(name, wrong, says, monkeypatch):
    outputs = checks.outputs

    def spoilt(problem, *place, **call):
        found = outputs(problem, *place, **call)
        if problem.name == name:
            wrong(problem, found)
        return found

    monkeypatch.setattr(checks, "outputs", spoilt)
    monkeypatch.setattr(checks, "_fault", lambda *_: None)
    (fault,) = checks.faults("torch", "softmax", torch.float32, CPU)
    assert fault.startswith(f"calls of {name} at 21 x 45 x 40: ")
    assert says in fault


def lost(found, places):
    """A value that is wrong where the gradients at these places alone are wanted."""
    wanted = [place for place, gradient in enumerate(found[1:]) if gradient is not None]
    if wanted == places:
        found[0] += 0.01


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (partial(lost, places=[]), "with gradients none and layout unaligned, the value"),
        (partial(lost, places=[0]), "with gradients only of argument 1 and layout by_columns"),
        (partial(lost, places=[1]), "with gradients only of argument 2 and layout unaligned"),
    ],
)
def test_calls_with_fewer_gradients_are_tried(wrong, says, monkeypatch):
    outputs = checks.outputs

    def spoilt(problem, backend, *place, **call):
        found = outputs(problem, backend, *place, **call)
        if backend == "fake" and problem.finite:
            wrong(found)
        return found

    fake = fakes.Fake()
    monkeypatch.setitem(fastsim.backends.__globals__["_BACKENDS"], "fake", fake)
    monkeypatch.setattr(checks, "outputs", spoilt)
    (fault,) = checks.faults("fake", "sigmoid", torch.float32, CPU)
    assert says in fault


@pytest.mark.parametrize("wanted", [(), (0,), (1,)])
def test_gradients_are_those_that_are_wanted(wanted):
    """And no other, not of a learnt number either: a kernel may then take another way."""
    problem = cases.problems("sigmoid", (5, 7, 4), torch.float32)[0]
    assert problem.learnt
    _, *grads = checks.outputs(problem, "eager", CPU, with_grad=wanted)
    assert [place for place, grad in enumerate(grads) if grad is not None] == [*wanted]


def test_other_layouts_are_others():
    rows = torch.randn(5, 4)
    for layout, stride, start in ((checks.unaligned, (5, 1), 1), (checks.by_columns, (1, 5), 0)):
        copy = layout(rows)
        assert torch.equal(copy, rows)
        assert (copy.stride(), copy.storage_offset()) == (stride, start)


@pytest.mark.parametrize("name", ["another GPU", "the same GPU", "of another program", "alone"])
def test_a_second_device_is_one_of_the_same_kind(name, monkeypatch):
    """One that cannot serve says nothing of the first."""
    names = ("the same GPU", "another GPU" if name == "another GPU" else "the same GPU")
    cuda, empty = torch.cuda, torch.empty

    def of_device(*size, device):
        if name == "of another program":
            raise torch.AcceleratorError("CUDA error: device is busy or unavailable")
        return empty(*size)

    monkeypatch.setattr(cuda, "device_count", lambda: 1 if name == "alone" else 2)
    monkeypatch.setattr(cuda, "get_device_name", lambda device: names[device.index or 0])
    monkeypatch.setattr(torch, "empty", of_device)
    found = checks._other_device(torch.device("cuda:0"))
    assert found == (torch.device("cuda:1") if name == "the same GPU" else None)


def test_what_is_timed_is_compiled_before(monkeypatch):
    """In the same sizes, by both backends, and by torch.compile where it is timed with it."""
    monkeypatch.setattr(checks, "TIMED", (5, 7))
    monkeypatch.setattr(checks, "WIDTH", 4)
    made, told = [], []

    def outputs(problem, backend, device):
        made.append((backend, problem.leaves[0].shape, os.environ.get(compiled.VARIABLE)))

    def faults(*place):
        assert os.environ[compiled.VARIABLE] == "0"
        return []

    monkeypatch.setattr(checks, "outputs", outputs)
    monkeypatch.setattr(checks, "faults", faults)
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    place = "torch", "sigmoid", torch.float32
    assert checks.refusal(*place, torch.device("meta"), told.append) is None
    assert made == [("torch", (rows, 4), None) for rows in (5, 5, 7, 7)]
    assert told[0] == "compilation for 5 rows (torch)"
    assert len(told) == len(made)
    made.clear()
    assert checks.refusal(*place, CPU) is None
    assert not made  # where nothing is timed


@pytest.mark.parametrize("kind", cases.KINDS)
def test_what_is_on_the_device_is_not_copied_again(kind):
    """Else a time would be that of copies from the host."""
    for problem in cases.problems(kind, (5, 7, 4), torch.float16):
        there = checks.on_device(problem, CPU)
        again = checks.on_device(there, CPU)
        assert all(map(operator.is_, _tensors(there), _tensors(again)))


def _tensors(problem):
    """All that a problem is given, one after the other."""

    def flat(value):
        return (
            [part for one in value for part in flat(one)] if isinstance(value, tuple) else [value]
        )

    return flat((*problem.leaves, *problem.arguments, *problem.options.values()))


def test_targets_are_made_where_they_are_wanted(monkeypatch):
    """Those of the largest size that is timed would take gigabytes."""
    drawn = []
    randint = torch.randint
    monkeypatch.setattr(
        torch,
        "randint",
        lambda *given, **options: drawn.append(given) or randint(*given, **options),
    )
    made = {one.name: one for one in cases.problems("softmax", (5, 7, 4), torch.float32)}
    before = len(drawn)
    assert not any((5, 7) in given or (7, 5) in given for given in drawn)
    for name in ("int8", "strided", "int8"):
        (targets,) = checks.on_device(made[name], CPU).arguments
        assert targets.shape == (5, 7)
    assert len(drawn) == before + 2


def test_the_ratio_is_the_mean_of_all_sizes(monkeypatch):
    """The geometric one: twice as fast at one size and half as fast at another is as fast."""
    monkeypatch.setattr(checks, "TIMED", (5, 7, 9))
    monkeypatch.setattr(checks, "WIDTH", 4)
    seconds = {("mine", 5): 1.0, ("mine", 7): 4.0, ("mine", 9): 54.0}
    told = []

    turns = []

    def time(problem, backend, device):
        turns.append(backend)
        return seconds.get((backend, len(problem.leaves[0])), 2.0)

    monkeypatch.setattr(checks, "_time", time)
    found = checks.ratio("mine", "sigmoid", torch.float32, torch.device("meta"), told.append)
    assert found == pytest.approx(3.0)
    assert told == [f"the time of {rows} rows" for rows in (5, 7, 9)]
    assert turns == ["mine", "torch"] * (len(turns) // 2)


def test_canaries_show_what_is_written_on_either_side():
    like, before = torch.zeros(3), (torch.Tensor.new_empty, torch.empty_like)
    for make in (lambda: like.new_empty(3), lambda: torch.empty_like(like)):
        for place in (-1, 3):
            with canaries() as broken:
                made = make().fill_(1.0)
                assert broken() == 0
                made.as_strided((1,), (1,), made.storage_offset() + place).fill_(1.0)
                assert broken() == 1
    assert (torch.Tensor.new_empty, torch.empty_like) == before


@pytest.mark.parametrize("name", ["torch", "triton", "cuda"])
def test_several_panels_are_several(name):
    pytest.importorskip("triton")
    rows, columns, _ = checks.TALL
    with variables({panel.VARIABLE: checks.SMALLEST_PANEL}):
        blocks = get(name).blocks(rows, columns, CPU)
        whole = get(name).blocks(rows, columns, CPU, whole_rows=True)
        assert min(len(list(blocks)), len(list(whole))) > 2


def test_the_shapes_on_a_device(monkeypatch):
    """More tiles than two for each multiprocessor; 1, 4, 5, 12 and 13 steps in depth."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fakes.Fake, "turning_widths", lambda self, dtype, device: (1280,))
    monkeypatch.setitem(fastsim.backends.__globals__["_BACKENDS"], "fake", fakes.Fake())
    found = checks.shapes("fake", torch.float16, torch.device("cuda:0"))
    assert {1280, 1285} <= {depth for _, _, depth in found}
    assert max((rows // 128) * (columns // 128) for rows, columns, _ in found) > 2 * 132
    assert {1, 4, 5, 12, 13} <= {depth // 64 for _, _, depth in found if depth % 64 == 0}
    assert any(rows % 128 == columns % 128 == 0 for rows, columns, _ in found)
    assert any(rows % 8 and columns % 8 and depth % 64 for rows, columns, depth in found)
    calls = checks.shapes_of_calls("fake", torch.float16, torch.device("cuda:0"))
    repeats, writes, *others = (shape for shape, _ in calls)
    assert (repeats[0] // 128) * (repeats[1] // 128) > 2 * 132
    assert repeats[2] == 1280
    assert writes in found
    assert all(size % 8 for size in writes[:2])
    assert min(others)[2] < 1280 < max(others)[2]


@pytest.mark.parametrize("arch", sorted({key[0] for key in table.TABLE} - {"interpreter"}))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_tried_on_both_sides_of_a_turning_width(arch, dtype, monkeypatch):
    """Kernels that keep scores start at one that each architecture has of its own."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(triton_backend, "architecture", lambda device: arch)
    widths = [width for _, _, width in checks.shapes("triton", dtype, torch.device("cuda:0"))]
    place = arch, table.operand_kind(dtype, arch), 4096
    for turning in table.block_sizes(*place).break_even, table.kept_sizes(*place).break_even:
        assert min(widths) < turning <= max(widths)
        assert turning in widths


@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_cases_of_every_kind(kind):
    """The torch backend is right by its own checks, in this process."""
    assert checks.faults("torch", kind, torch.float32, CPU) == []


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_loss_of_dot_products_is_checked_with_them(kind):
    made = cases.problems(kind, (5, 7, 4), torch.float32)
    takes = any("similarity" in inspect.signature(one.loss).parameters for one in made)
    assert takes == any(DOT in one.extras for one in made)


def test_every_kind_with_kernels_has_cases():
    kernels = {kind for name in ("triton", "cuda") for kind in _kinds(name)}
    assert kernels <= set(cases.KINDS)


def _kinds(name):
    try:
        return get(name).kinds()
    except ImportError:
        return ()
