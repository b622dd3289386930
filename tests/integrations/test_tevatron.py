"""Tevatron's losses against ours in their place."""

import functools
import importlib
import importlib.util
import sys
import types

import pytest
import torch

import fastsim
from fastsim.integrations import overrides
from tests.integrations.beside import compare, results
from tests.integrations.lone_peer import ROWS, WIDTH, alone, doubling, of
from tests.integrations.peer_names import assert_serves
from tests.integrations.two_processes import of_each_rank
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

# What its repository has; the package has an __init__ with n_target.
REPOSITORY = """
import torch
from torch.nn import functional as F

class SimpleContrastiveLoss:
    def __call__(self, x, y, target=None, reduction='mean'):
        if target is None:
            target_per_qry = y.size(0) // x.size(0)
            target = torch.arange(0, x.size(0) * target_per_qry, target_per_qry)
        logits = torch.matmul(x, y.transpose(0, 1))
        return F.cross_entropy(logits, target, reduction=reduction)

class DistributedContrastiveLoss(SimpleContrastiveLoss): pass
"""


@pytest.fixture
def repository(tevatron, monkeypatch):
    theirs = types.ModuleType("tevatron.loss")
    exec(REPOSITORY, vars(theirs))
    monkeypatch.setitem(sys.modules, "tevatron.loss", theirs)
    monkeypatch.setattr(sys.modules["tevatron"], "loss", theirs)
    spec = importlib.util.spec_from_file_location("of_the_repository", tevatron[0].__file__)
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    return ours, theirs


@pytest.mark.parametrize("passages", [ROWS, 3 * ROWS, 3 * ROWS + 2])
def test_tevatron_of_the_repository(repository, passages):
    ours, theirs = (package.SimpleContrastiveLoss() for package in repository)
    sides = of(ROWS, WIDTH, seed=1), of(passages, WIDTH, seed=2)
    compare(ours, theirs, sides)
    target = torch.arange(ROWS).flip(0)
    compare(*(functools.partial(loss, target=target) for loss in (ours, theirs)), sides)
    half = [side.bfloat16() for side in sides]
    assert ours(*half).dtype == theirs(*half).dtype


def scored(kind):
    class Scored(kind):
        temperature = 0.5

        def __call__(self, x, y, **options):
            return super().__call__(x / self.temperature, y, **options)

    loss = Scored()
    loss.temperature = 0.1
    return loss


def test_tevatron_with_further_attributes(tevatron):
    ours, theirs = (scored(package.SimpleContrastiveLoss) for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    with pytest.warns(UserWarning, match="Scored: temperature has no fused form; tevatron's"):
        value = ours(*sides)
    assert torch.equal(value, theirs(*sides))
    ours(*sides)  # a second note would be an error


def test_a_patch_of_tevatron(tevatron, monkeypatch):
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    plain = ours(*sides)
    doubling(monkeypatch, tevatron[1].SimpleContrastiveLoss, "__call__")
    with pytest.warns(UserWarning, match="SimpleContrastiveLoss: __call__ has been replaced"):
        value = ours(*sides)
    assert torch.equal(value, theirs(*sides))
    torch.testing.assert_close(value, 2 * plain)


def packages(monkeypatch):
    """(ours, theirs)."""
    theirs = alone(monkeypatch, "tevatron.loss")
    sys.modules["tevatron"].loss = theirs
    return importlib.import_module("fastsim.integrations.tevatron"), theirs


@pytest.fixture
def tevatron(monkeypatch):
    return packages(monkeypatch)


def test_names_of_tevatron(tevatron):
    assert_serves(*tevatron)


@pytest.mark.parametrize("passages", [1, 3])
def test_tevatron(tevatron, passages):
    ours, theirs = (package.SimpleContrastiveLoss(passages) for package in tevatron)
    assert isinstance(ours, type(theirs))
    sides = of(ROWS, WIDTH, seed=1), of(ROWS * passages, WIDTH, seed=2)
    compare(ours, theirs, sides)
    target = torch.arange(ROWS).flip(0)
    for reduction in ("mean", "sum"):
        options = {"target": target, "reduction": reduction}
        compare(*(functools.partial(loss, **options) for loss in (ours, theirs)), sides)
    values = [loss(*sides, target=target, reduction="none") for loss in (ours, theirs)]
    torch.testing.assert_close(*values)
    half = [side.bfloat16() for side in sides]
    assert ours(*half).dtype == theirs(*half).dtype
    with pytest.raises(ValueError, match="y: wanted"):
        ours(sides[0], sides[1][1:])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tevatron_of_no_queries(tevatron, reduction):
    none = torch.zeros(0, WIDTH)
    values = [p.SimpleContrastiveLoss()(none, none, reduction=reduction) for p in tevatron]
    torch.testing.assert_close(*values, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "as on a GPU"])
def test_tevatron_leaves_out_what_is_ignored(tevatron, reduction, read, monkeypatch):
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    if not read:
        monkeypatch.setattr(tevatron[0], "can_be_read", lambda target: False)
    sides = of(ROWS, WIDTH, seed=1), of(2 * ROWS, WIDTH, seed=2)
    target = torch.randint(0, 2 * ROWS, (ROWS,), generator=fresh(3))
    target[[2, 5]] = -100

    def call(loss):
        return lambda x, y: loss(x, y, target=target, reduction=reduction).square().sum()

    compare(call(ours), call(theirs), sides)
    with fastsim.use_backend("eager"):
        compare(call(ours), call(theirs), sides)
    assert ours(*sides, target=torch.full((ROWS,), -100)).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "as on a GPU"])
def test_tevatron_where_all_is_ignored(tevatron, reduction, read, monkeypatch):
    """The mean of no query is NaN; no gradient is."""
    if not read:
        monkeypatch.setattr(tevatron[0], "can_be_read", lambda target: False)
    target, found = torch.full((ROWS,), -100), []
    for package in tevatron:
        sides = [of(ROWS, WIDTH, seed=seed).requires_grad_() for seed in (1, 2)]
        value = package.SimpleContrastiveLoss()(*sides, target=target, reduction=reduction)
        found.append([value.detach(), *torch.autograd.grad(value.sum(), sides)])
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0][0].isnan().all() == (reduction == "mean")


def test_tevatron_of_other_targets(tevatron):
    """Integers are places, in theirs only int64 and bytes; floats are probabilities, theirs."""
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    places = torch.arange(ROWS).flip(0)
    wanted = theirs(*sides, target=places)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        torch.testing.assert_close(ours(*sides, target=places.to(dtype)), wanted)
        if dtype != torch.uint8:
            with pytest.raises(RuntimeError):
                theirs(*sides, target=places.to(dtype))
    soft = of(ROWS, ROWS, seed=3).softmax(1)
    overrides._warned.clear()
    with pytest.warns(
        UserWarning, match=r"a target of torch\.float32 has no fused form; tevatron's"
    ):
        value = ours(*sides, target=soft)
    assert torch.equal(value, theirs(*sides, target=soft))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match=r"x of torch\.bfloat16 against y"):
            value = ours(sides[0].bfloat16(), sides[1])
        assert torch.equal(value, theirs(sides[0].bfloat16(), sides[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, target: (x, y[:, 1:], target), f"y: wanted width {WIDTH}"),
        (lambda x, y, target: (x, y[:0], target), "y: wanted at least one element"),
        (lambda x, y, target: (x[None], y, target), "x: wanted 2"),
        (lambda x, y, target: (x, y, target[1:]), f"target: wanted {ROWS} entries"),
        (lambda x, y, target: (x, y, target[:, None]), "target: wanted 1 dim"),
        (lambda x, y, target: (x, y, target + 1), f"target: wanted values in .0, {ROWS}."),
        (lambda x, y, target: (x, y, target - 1), f"target: wanted values in .0, {ROWS}."),
    ],
)
def test_tevatron_refuses_what_does_not_fit(tevatron, change, message):
    loss = tevatron[0].SimpleContrastiveLoss()
    given = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2), torch.arange(ROWS)
    with pytest.raises(ValueError, match=message):
        loss(*change(*given))


# ---- two processes ----

SCALED = (True, False)


def work(rank):
    """The results on this rank: ours and theirs in float32, theirs in float64, how these move."""
    found = []
    with pytest.MonkeyPatch.context() as patches:
        both = packages(patches)
        sides = [of(n, WIDTH, seed=10 * rank + n) for n in (ROWS, 2 * ROWS)]
        wide = [side.double() for side in sides]
        for scaled in SCALED:
            losses = [p.DistributedContrastiveLoss(2, scale_loss=scaled) for p in both]
            assert losses[0].unfused_reason(*sides, None) is None
            truth = functools.partial(results, losses[1])
            of_both = [results(loss, sides, torch.float32) for loss in losses]
            found.append((*of_both, truth(wide), conditioning(truth, wide)))
    return found


def test_tevatron_in_two_processes(tevatron, tmp_path):
    eps = torch.finfo(torch.float32).eps
    for found in of_each_rank(work, tmp_path):
        assert len(found) == len(SCALED)
        for case in found:
            for mine, dense, exact, move in zip(*case, strict=True):
                moved = eps * move
                assert_close("", mine, exact, dense, torch.float32, moved=moved, independent=True)
