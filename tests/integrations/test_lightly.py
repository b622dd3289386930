"""lightly's losses against ours in their place."""

import functools
import importlib
import itertools
import sys
import types

import pytest
import torch

from fastsim.integrations import dtypes
from tests.integrations.beside import compare, results
from tests.integrations.lone_peer import ROWS, WIDTH, alone, bare, doubling, mixed, of
from tests.integrations.two_processes import WORLD, of_each_rank
from tests.measure import assert_close, conditioning


@pytest.fixture
def lightly(monkeypatch):
    return packages(monkeypatch)


def packages(monkeypatch):
    """(ours, theirs)."""
    name = "lightly.models.modules.memory_bank"
    alone(monkeypatch, name, "lightly.models.utils")
    folder = sys.modules["lightly"].__path__[0]
    bare(monkeypatch, "lightly.utils", f"{folder}/utils")
    sys.modules["lightly.models"].utils = sys.modules["lightly.models.utils"]
    entropy = alone(monkeypatch, "lightly.loss.ntx_ent_loss")
    decoupled = alone(monkeypatch, "lightly.loss.dcl_loss")
    theirs = types.SimpleNamespace(**vars(entropy) | vars(decoupled))
    return importlib.import_module("fastsim.integrations.lightly"), theirs


LIGHTLY = [
    ("NTXentLoss", {}),
    ("NTXentLoss", {"temperature": 0.07}),
    ("NTXentLoss", {"temperature": torch.tensor(0.3).bfloat16()}),
    ("DCLLoss", {"temperature": torch.tensor(0.3).bfloat16()}),
    ("DCLLoss", {}),
    ("DCLLoss", {"temperature": 0.5, "weight_fn": lambda x, y: 1 + (x * y).sum(1).detach()}),
    ("DCLLoss", {"weight_fn": lambda x, y: 0.7}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()[None]}),
    ("DCLLoss", {"weight_fn": lambda x, y: 2 + x[:, 0].detach()}),  # not the same turned round
]


@pytest.mark.parametrize(("name", "options"), LIGHTLY)
def test_lightly(lightly, name, options):
    ours, theirs = lightly
    assert issubclass(getattr(ours, name), getattr(theirs, name))
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(getattr(ours, name)(**options), getattr(theirs, name)(**options), views)
    one = [view[:1] for view in views]
    torch.testing.assert_close(getattr(ours, name)(**options)(*one), getattr(theirs, name)()(*one))


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss", "DCLWLoss"])
def test_views_that_are_not_alike(lightly, name):
    loss, view = getattr(lightly[0], name)(), of(ROWS, WIDTH, seed=1)
    with pytest.raises(ValueError, match=f"out1: wanted {ROWS} rows, as many as out0"):
        loss(view, view[1:])
    with pytest.raises(ValueError, match=f"out1: wanted width {WIDTH}, that of out0"):
        loss(view, view[:, 1:])


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
def test_a_temperature_below_zero(lightly, name):
    """Theirs takes any but 0."""
    ours, theirs = (getattr(package, name)(temperature=-0.5) for package in lightly)
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    with pytest.warns(UserWarning, match=f"{name}: temperature has no fused form"):
        assert torch.equal(ours(*views), theirs(*views))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly_weights(lightly):
    ours, theirs = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(ours.DCLWLoss(sigma=0.3), theirs.DCLWLoss(sigma=0.3), views)


def test_lightly_without_a_fused_form(lightly):
    ours, _ = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    values = []
    for package in lightly:
        loss = package.NTXentLoss()
        loss.cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
        if package is ours:
            with pytest.warns(UserWarning, match="NTXentLoss: cross_entropy has been replaced"):
                values.append(loss(*views))
        else:
            values.append(loss(*views))
    assert torch.equal(*values)


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
def test_lightly_of_two_dtypes(lightly, name):
    given, plain = mixed([of(ROWS, WIDTH, seed=seed) for seed in (1, 2)])
    ours, theirs = (getattr(package, name)() for package in lightly)
    torch.testing.assert_close(ours(*given), ours(*plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).dtype == theirs(*given).dtype


def wide(x, y):
    return torch.ones(len(x))


def narrow(x, y):
    return torch.ones(len(x), dtype=x.dtype)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("weights", list(itertools.permutations([None, wide, narrow])))
def test_the_dtype_of_a_loss_with_weights(lightly, weights, wrapped, monkeypatch):
    """Whatever other loss of the class was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    views = [of(ROWS, WIDTH, seed=seed).bfloat16() for seed in (1, 2)]
    for weight in weights:
        weight_fn = functools.partial(weight) if wrapped and weight is not None else weight
        ours, theirs = (package.DCLLoss(weight_fn=weight_fn)(*views) for package in lightly)
        assert ours.dtype == theirs.dtype
        assert (ours.dtype == torch.float32) == (weight is wide)


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
def test_the_dtype_of_a_loss_with_a_tensor(lightly, name, monkeypatch):
    """Of shape (1,), which counts in theirs, whatever was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    views = [of(ROWS, WIDTH, seed=seed).bfloat16() for seed in (1, 2)]
    for value in (torch.tensor([0.3]), 0.3, torch.tensor([0.3]).double()):
        ours, theirs = (getattr(package, name)(value)(*views) for package in lightly)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("name", "owner"),
    [("NTXentLoss", "NTXentLoss"), ("DCLLoss", "DCLLoss"), ("DCLWLoss", "DCLLoss")],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_patch_of_lightly(lightly, name, owner, monkeypatch):
    ours, theirs = (getattr(package, name)() for package in lightly)
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    plain = ours(*views)
    doubling(monkeypatch, getattr(lightly[1], owner), "forward")
    with pytest.warns(UserWarning, match=f"{name}: forward has been replaced"):
        value = ours(*views)
    assert torch.equal(value, theirs(*views))
    torch.testing.assert_close(value, 2 * plain)


# ---- a memory bank ----

BANK = 37


def with_banks(lightly, **options):
    """(ours, theirs) with one and the same content."""
    losses = [package.NTXentLoss(memory_bank_size=(BANK, WIDTH), **options) for package in lightly]
    content = torch.nn.functional.normalize(of(BANK, WIDTH, seed=3))
    for loss in losses:
        loss.memory_bank.bank = content.clone()
    return losses


def of_bank(loss):
    """The loss of two views, with the bank in their dtype and unchanged after it."""
    content = loss.memory_bank.bank.clone()

    def call(*views):
        loss.memory_bank.bank = content.to(views[0].dtype, copy=True)
        loss.memory_bank.bank_ptr.zero_()
        return loss(*views)

    return call


@pytest.mark.parametrize("temperature", [0.5, 0.05, torch.tensor(0.3).bfloat16()])
def test_a_memory_bank(lightly, temperature):
    ours, theirs = with_banks(lightly, temperature=temperature)
    assert isinstance(ours, type(theirs))
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(of_bank(ours), of_bank(theirs), views)


def test_what_a_memory_bank_holds(lightly):
    """A batch with a gradient comes in, and past the end the first of it is what has room."""
    losses = with_banks(lightly)
    before = losses[0].memory_bank.bank.clone()
    with torch.no_grad():
        values = [loss(of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)) for loss in losses]
    torch.testing.assert_close(*values)
    assert all(torch.equal(loss.memory_bank.bank, before) for loss in losses)
    for seed in range(4, 10):
        given = [of(ROWS, WIDTH, seed=seed + step).requires_grad_() for step in (0, 20)]
        values = [loss(*given) for loss in losses]
        torch.testing.assert_close(*values)
        banks = [loss.memory_bank for loss in losses]
        assert torch.equal(banks[0].bank, banks[1].bank)
        assert torch.equal(banks[0].bank_ptr, banks[1].bank_ptr)
        assert not torch.equal(banks[0].bank, before)


@pytest.mark.parametrize("learns", [(True, False), (False, True)])
def test_the_first_view_says_whether_a_batch_comes_in(lightly, learns):
    """The second may come from a model that does not learn, as in MoCo."""
    losses = with_banks(lightly)
    before = losses[0].memory_bank.bank.clone()
    for loss in losses:
        loss(*(of(ROWS, WIDTH, seed=4 + i).requires_grad_(each) for i, each in enumerate(learns)))
    banks = [loss.memory_bank.bank for loss in losses]
    assert torch.equal(*banks)
    assert torch.equal(banks[0], before) != learns[0]


def test_the_dtype_of_a_loss_after_one_with_a_bank(lightly, monkeypatch):
    """Theirs takes a bank only in the dtype of the views."""
    monkeypatch.setattr(dtypes, "_known", {})
    views = [of(ROWS, WIDTH, seed=seed).bfloat16() for seed in (1, 2)]
    with_bank, theirs = (p.NTXentLoss(memory_bank_size=(BANK, WIDTH)) for p in lightly)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        theirs(*views)
    with_bank(*views)
    ours, theirs = (package.NTXentLoss()(*views) for package in lightly)
    assert ours.dtype == theirs.dtype


def test_a_memory_bank_under_autocast(lightly):
    """The dtype of theirs, its error at most, and a bank that rounding does not reach."""
    ours, theirs = with_banks(lightly)
    given = [of(ROWS, WIDTH, seed=seed).requires_grad_() for seed in (1, 2)]
    wide = [view.detach().double() for view in given]
    exact = functools.partial(results, of_bank(with_banks(lightly)[1]))
    (truth, *_), (moved, *_) = exact(wide), conditioning(exact, wide)
    with torch.autocast("cpu", torch.bfloat16):
        values = ours(*given), theirs(*given)
    assert values[0].dtype == values[1].dtype
    mine, dense = (value.detach() for value in values)
    eps = torch.finfo(torch.bfloat16).eps
    assert_close("loss", mine, truth, dense, mine.dtype, moved=eps * moved, independent=True)
    assert torch.equal(ours.memory_bank.bank, theirs.memory_bank.bank)


# ---- two processes ----

GATHERED = [
    ("NTXentLoss", {"temperature": 0.3}),
    ("NTXentLoss with a bank", {}),
    ("DCLLoss", {}),
    ("DCLLoss", {"weight_fn": lambda x, y: 2 + x[:, 0].detach()}),
    ("DCLWLoss", {"sigma": 0.3}),
]


def rows_of_all(rows):
    parts = [torch.empty_like(rows) for _ in range(WORLD)]
    torch.distributed.all_gather(parts, rows)
    return torch.cat(parts)


def both_of(packages, name, options):
    """(ours, theirs), gathered."""
    if name == "NTXentLoss with a bank":
        return [of_bank(loss) for loss in with_banks(packages, gather_distributed=True)]
    return [getattr(package, name)(gather_distributed=True, **options) for package in packages]


def work(rank):
    """The results of ours and theirs on this rank, in float32, and of theirs in float64."""
    found = []
    with pytest.MonkeyPatch.context() as patches:
        both = packages(patches)
        # A module that `alone` left empty.
        sys.modules["lightly.models.utils"].concat_all_gather = rows_of_all
        for case in GATHERED:
            views = [of(ROWS, WIDTH, seed=10 * rank + seed) for seed in (1, 2)]
            losses = both_of(both, *case)
            wide = [view.double() for view in views]
            truth = functools.partial(results, losses[1])
            of_both = [results(loss, views, torch.float32) for loss in losses]
            found.append((*of_both, truth(wide), conditioning(truth, wide)))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patches:
        packages(patches)  # where there is none the tests are left out, not processes ended
    return of_each_rank(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("index", range(len(GATHERED)), ids=lambda i: f"{i} {GATHERED[i][0]}")
def test_two_processes(ranks, index):
    eps = torch.finfo(torch.float32).eps
    for found in ranks:
        for mine, dense, exact, move in zip(*found[index], strict=True):
            assert_close(
                "result", mine, exact, dense, torch.float32, moved=eps * move, independent=True
            )


def test_gathered_in_one_process(lightly):
    """Nothing is there to gather: the loss of the batch, without a warning."""
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    for name in ("NTXentLoss", "DCLLoss"):
        ours, theirs = (getattr(package, name)(gather_distributed=True) for package in lightly)
        compare(ours, theirs, views)
