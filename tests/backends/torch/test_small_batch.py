"""A small batch of the torch backend: the same as its panels, in fewer operations.

Against the oracles it is in tests/losses.
"""

import functools

import pytest
import torch

from bench.host_time import calls_of
from fastsim import losses
from fastsim.backends.torch import panels
from fastsim.backends.torch.backend import TorchBackend
from fastsim.engine.one_call import in_panels
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss

N, M, D = 13, 29, 8
IDS = torch.arange(N) % 4, torch.arange(M) % 4
CALLS = {
    "info_nce": (losses.info_nce, {}),
    "symmetric": (losses.info_nce, {"symmetric": True}),
    "excluding": (losses.info_nce, {"symmetric": True, "exclude": IDS, "margin": 0.1}),
    "shared": (losses.info_nce, {"positives": torch.arange(N) % 5}),
    "siglip": (losses.siglip, {}),
    "siglip groups": (losses.siglip, {"targets": IDS}),
    "dot": (losses.info_nce, {"symmetric": True, "similarity": "dot"}),
    "siglip dot": (losses.siglip, {"similarity": "dot"}),
    "semi-hard": (losses.full_triplet, {}),
    "hard": (losses.full_triplet, {"mining": "hard", "exclude": IDS}),
}
SCALES = {losses.info_nce: "temperature", losses.siglip: "scale"}


def step(name, sides, wants=(True, True), learnt=None):
    """[the loss, the gradients that are wanted]."""
    loss, options = CALLS[name]
    sides = [
        side.detach().clone().requires_grad_(want) for side, want in zip(sides, wants, strict=True)
    ]
    leaves = [side for side in sides if side.requires_grad]
    if learnt is not None:
        number = torch.tensor(learnt, dtype=sides[0].dtype, requires_grad=True)
        options, leaves = options | {SCALES[loss]: number}, [*leaves, number]
    value = loss(*sides, **options, backend="torch")
    return [value.detach(), *torch.autograd.grad(2 * value, leaves)]


@pytest.fixture
def served(monkeypatch):
    """The kinds of the losses that were made this way."""
    kinds, original = [], TorchBackend.in_one_call

    def noted(self, tile, *given):
        kinds.append(tile.kind)
        return original(self, tile, *given)

    monkeypatch.setattr(TorchBackend, "in_one_call", noted)
    return kinds


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_panels(name, wants, served):
    sides = torch.randn(N, D, dtype=torch.float64), torch.randn(M, D, dtype=torch.float64)
    learnt = 0.3 if CALLS[name][0] in SCALES else None
    found = step(name, sides, wants, learnt)
    assert len(served) == 1
    with in_panels():
        known = step(name, sides, wants, learnt)
    assert len(served) == 1
    for mine, other in zip(found, known, strict=True):
        rounding = 64 * torch.finfo(torch.float64).eps
        assert (mine - other).abs().max() <= rounding * max(1, other.abs().max())


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_again(name):
    sides = torch.randn(N, D), torch.randn(M, D)
    assert all(map(torch.equal, step(name, sides), step(name, sides)))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
@pytest.mark.parametrize("name", ["info_nce", "symmetric", "siglip", "semi-hard"])
def test_fewer_operations(name):
    """At most half of those of the panels."""
    sides = torch.randn(N, D), torch.randn(M, D)

    def call():
        step(name, sides)

    call()
    calls = calls_of(call)
    with in_panels():
        assert 2 * calls <= calls_of(call) + len(sides) * 4  # `step` itself takes some


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_rows_with_themselves(similarity, served):
    x, groups = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.arange(N) % 4
    options = {"reduction": "sum", "similarity": similarity, "backend": "torch"}
    found = []
    for way in (True, False):
        if way:
            value = losses.sup_con(x, groups, **options)
        else:
            with in_panels():
                value = losses.sup_con(x, groups, **options)
        found.append([value.detach(), *torch.autograd.grad(value, x)])
    assert len(served) == 1
    for mine, other in zip(*found, strict=True):
        assert (mine - other).abs().max() <= 64 * torch.finfo(mine.dtype).eps * other.abs().max()


def test_where_it_is_not_served(served, monkeypatch):
    x, y = torch.randn(N, D), torch.randn(M, D)
    losses.info_nce(x, y, IDS[0], symmetric=True, backend="torch")  # rows share a positive
    losses.siglip(x, y, torch.ones(N, M), backend="torch")
    losses.info_nce(x, y, reduction="none", backend="torch")
    monkeypatch.setenv("FASTSIM_PANEL_MB", "0.001")
    losses.info_nce(x, y, backend="torch")
    assert not served


@pytest.mark.parametrize(
    ("device", "gigabytes", "most"), [("cpu", 1, 512), ("meta", 4, 2048), ("meta", 16, 4096)]
)
def test_the_largest_that_is_served(device, gigabytes, most, monkeypatch):
    monkeypatch.setattr(panels, "memory_of", lambda device: gigabytes << 30)
    tile = TileLoss("softmax", Pairs(torch.arange(3, device=device), distinct=True))
    serves = functools.partial(
        TorchBackend().serves_one_call, tile, self_similarity=False, dtype=torch.float32
    )
    assert serves(most, most, 64)
    assert not serves(most + 1, most, 64)


def test_what_it_lacks_goes_through_panels(served):
    """A guide and a bias, which the other backends' one call has."""
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randn(M, D, dtype=torch.float64)
    guide = torch.randn(N, 3, dtype=torch.float64), torch.randn(M, 3, dtype=torch.float64)
    for options in ({"guide": guide}, {"candidate_bias": torch.randn(M, dtype=torch.float64)}):
        got, wanted = (losses.info_nce(x, y, **options, backend=b) for b in ("torch", "eager"))
        torch.testing.assert_close(got, wanted)
    assert not served
