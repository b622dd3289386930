"""The steps between the products through torch.compile: right, once for every shape, or not at all.

Here the compiler writes C++ where it writes Triton on a GPU. It is slow, so that it sees one case
of each kind of loss; the function that it is given is tried with every case, uncompiled.
"""

import warnings

import pytest
import torch

import fastsim
from fastsim.backends.base import Backend
from fastsim.backends.torch import compiled, panels
from fastsim.backends.torch.backend import TorchBackend
from fastsim.backends.torch.epilogues import EPILOGUES, FEW
from fastsim.backends.triton import installed
from tests.cases import BY_NAME, CASES
from tests.losses.test_losses import compare

pytestmark = pytest.mark.usefixtures("in_passes")  # what is compiled are panels
TILES = [case for case in CASES if case.tile and case.loss is not fastsim.full_triplet]
# One of each kind, with as much of it as a case has; dense and grouped targets among them.
OF_KINDS = {
    "softmax": "info_nce-everything",
    "sigmoid": "siglip-soft",
    "squared_error": "matrix_mse-groups",
    "multi_positive": "nt_xent",
    "multi_similarity": "multi_similarity",
    "circle": "circle",
    "decoupled": "decoupled_contrastive-dot-bias",
    "debiased": "debiased_contrastive-hard",
    "levels": "cosent_matrix-groups",
    "distillation": "distill",
}
SHAPES = ((12, 12, 18), (13, 29, 18), (5, 7, 4), (26, 27, 18))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Compilation of every panel, and nothing compiled before."""
    monkeypatch.setenv(compiled.VARIABLE, "1")
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_told", set())


@pytest.fixture
def uncompiled(monkeypatch):
    """What torch.compile would be given, as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def compilations():
    """How many graphs torch.compile has handed to a compiler."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def works():
    """Whether all that was asked for was compiled."""
    return bool(compiled._functions) and None not in compiled._functions.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_the_function_that_is_compiled(case, dtype, uncompiled, small_panels):
    compare(case, "torch", dtype, (13, 29, 18), seed=3)
    assert works() or case.name.startswith("batch_hard")


@pytest.mark.parametrize("kind", OF_KINDS)
def test_every_kind_compiled_once(kind):
    """One compilation for each step serves every shape, with the tolerances of all backends."""
    before = compilations()
    for shape in SHAPES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(BY_NAME[OF_KINDS[kind]], "torch", torch.float32, shape, seed=5)
    assert works()
    assert {key[1] for key in compiled._functions} == {kind}
    assert compilations() - before == len(compiled._functions) <= 2


@pytest.mark.parametrize("name", ["info_nce", "siglip"])
def test_into_operands_of_16_bits(name, uncompiled, monkeypatch):
    """Score gradients go straight into the operands of their products, as they would by a copy."""
    monkeypatch.setattr(panels, "half_products", lambda *_: True)
    monkeypatch.setattr(TorchBackend, "number", Backend.number)
    found = []
    sides = [torch.randn(n, 18).bfloat16() for n in (13, 29)]
    for asked in "10":
        monkeypatch.setenv(compiled.VARIABLE, asked)
        leaves = [side.clone().requires_grad_() for side in sides]
        getattr(fastsim, name)(*leaves, backend="torch").backward()
        found.append([leaf.grad.double() for leaf in leaves])
    assert works()
    for mine, theirs in zip(*found, strict=True):
        most = torch.finfo(torch.bfloat16).eps * theirs.abs().max()
        assert (mine - theirs).abs().max() <= most


def test_every_kind_is_there():
    assert set(OF_KINDS) == set(EPILOGUES)


def rows():
    return [torch.randn(n, 6, requires_grad=True) for n in (9, 11)]


def test_where_it_does_not_compile(monkeypatch):
    """The same bits as without it, and one warning."""

    def failing(graph, inputs):
        raise RuntimeError("no compiler in sight")

    monkeypatch.setattr(compiled, "COMPILER", failing)
    x, y = rows()
    with pytest.warns(UserWarning, match="uncompiled on cpu.*no compiler in sight"):
        found = fastsim.siglip(x, y, backend="torch")
    others = fastsim.siglip(x, y, backend="torch"), fastsim.info_nce(x, y, backend="torch")
    monkeypatch.setenv(compiled.VARIABLE, "0")
    wanted = fastsim.siglip(x, y, backend="torch")
    assert torch.equal(found, wanted)
    assert torch.equal(others[0], wanted)
    assert torch.equal(others[1], fastsim.info_nce(x, y, backend="torch"))


def test_scores_outlive_a_failure(monkeypatch):
    """A function that fails after it has written is as if it had not."""

    def spoiling(function, **_):
        def run(panel, *others):
            panel.fill_(7.0)
            raise RuntimeError("a kernel failed")

        return run

    monkeypatch.setattr(torch, "compile", spoiling)
    x, y = rows()
    with pytest.warns(UserWarning, match="a kernel failed"):
        found = fastsim.siglip(x, y, backend="torch")
    monkeypatch.setenv(compiled.VARIABLE, "0")
    assert torch.equal(found, fastsim.siglip(x, y, backend="torch"))


def test_after_too_many_compilations(monkeypatch):
    """What torch.compile gives up on later goes on without it."""
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    x, y = rows()
    loss = fastsim.siglip(x, y, backend="torch")
    assert works()

    def exhausted(*arguments):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("recompile_limit reached")

    for key in compiled._functions:
        monkeypatch.setitem(compiled._functions, key, exhausted)
    with pytest.warns(UserWarning, match="recompile_limit reached"):
        again = fastsim.siglip(x, y, backend="torch")
    torch.testing.assert_close(again, loss)
    assert not works()


@pytest.mark.parametrize("when", ["recorded", "of one row", "turned off"])
def test_where_it_is_not_tried(when, monkeypatch):
    x, y = rows()
    if when == "recorded":
        monkeypatch.setattr(compiled, "_capturing", lambda panel: True)
    elif when == "turned off":
        monkeypatch.setenv(compiled.VARIABLE, "0")
    else:
        x = x[:1]
    fastsim.siglip(x, y[: len(x)] if when == "of one row" else y, backend="torch")
    assert not compiled._functions


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(compiled.VARIABLE, "yes")
    with pytest.raises(ValueError, match="FASTSIM_COMPILE: wanted 0, 1 or auto, got 'yes'"):
        fastsim.siglip(*rows(), backend="torch")


def test_by_default_on_gpus_with_triton(monkeypatch):
    monkeypatch.delenv(compiled.VARIABLE)
    monkeypatch.setattr(installed, "FOUND", True)
    monkeypatch.setattr(panels, "_share", lambda device: 512 << 20)
    gpu, large = torch.device("cuda"), 4096**2 + 1  # more than is worked on as one matrix
    assert compiled.wanted(gpu, large)
    assert not compiled.wanted(gpu, large - 1)
    assert not compiled.wanted(torch.device("cpu"), large)
    assert not compiled.wanted(torch.device("mps"), large)
    monkeypatch.setattr(installed, "FOUND", False)
    assert not compiled.wanted(gpu, large)


def test_another_process_writes_the_same_code(monkeypatch):
    """By an option that the compiler has; another compiler is given none."""
    given = []

    def noted(function, **options):
        given.append(options)
        return function

    monkeypatch.setattr(torch, "compile", noted)
    x, y = rows()
    fastsim.siglip(x, y, backend="torch")
    assert hasattr(torch._inductor.config, "deterministic")
    assert given[0]["options"] == {"deterministic": True}
    assert given[0]["dynamic"]
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    assert compiled._options("eager") is None


def test_many_levels_are_compiled_where_nothing_is_scattered(uncompiled, monkeypatch):
    """The score gradients of two passes."""
    monkeypatch.setattr(TorchBackend, "whole_matrix_fits", lambda *_: False)
    x, y = rows()
    targets = torch.arange(99.0).view(9, 11).remainder(FEW + 3)
    value = fastsim.cosent_matrix(x, y, targets, scale=2.0, backend="torch")
    found = torch.autograd.grad(value, (x, y))
    truth = fastsim.cosent_matrix(x, y, targets, scale=2.0, backend="eager")
    torch.testing.assert_close(found, torch.autograd.grad(truth, (x, y)))
    assert [key[0].__name__ for key in compiled._functions] == ["_score_grad"]


def test_inside_another_compilation(monkeypatch):
    """A compiled model calls the loss as one operator, whose step is compiled by itself."""
    monkeypatch.setattr(compiled, "COMPILER", "eager")

    def loss(x, y):
        return fastsim.siglip(x, y, backend="torch")

    x, y = rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(loss, backend="eager", fullgraph=True)(x, y)
    assert works()
    assert torch.equal(found, loss(x, y))
