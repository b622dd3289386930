"""What a group of one process shows: what is computed between the exchanges."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastsim
from fastsim.backends import get
from fastsim.backends.torch.backend import TorchBackend
from fastsim.distributed import Batch, Ring
from fastsim.engine.autograd import tile_loss
from fastsim.engine.ring import _larger, ring_sum
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.distributed import ranks
from tests.seeds import fresh

ROWS = 5


def test_dtensors_of_a_mesh_without_names_are_refused(alone):
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int))
    x = distribute_tensor(torch.randn(4, 6), mesh, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match=r"anchors: wanted .* mesh_dim_names, got 2 dimensions"):
        fastsim.info_nce(x, x)
    named = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("replica", "rows"))
    x = distribute_tensor(x.full_tensor(), named, [Replicate(), Shard(0)])
    assert fastsim.info_nce(x, x).isfinite()
    with pytest.raises(TypeError, match="too many positional arguments"):
        fastsim.info_nce(x, x, None, 0.1)


def test_states_on_a_ring_are_as_wide_as_without(alone):
    """Log-sum-exps, which are merged with others."""
    x, y = torch.randn(2, ROWS, ranks.WIDTH)
    given = {"scale": 2.0, "formula": None, "backend": get("torch")}
    found = [
        tile_loss(TileLoss("softmax", Pairs()), x, y, batch=batch, **given)
        for batch in (Batch([ROWS], [ROWS], alone, ring=True), None)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0].dtype == torch.float64


def test_the_gradient_of_a_scale_is_summed_as_wide_on_a_ring(alone, monkeypatch):
    """Terms of which float32 would keep nothing but the large ones."""

    def rows_backward(self, grad_unit, x, inverse, factor, dtype):
        large = 2.0 ** torch.finfo(torch.float32).bits
        return torch.zeros_like(x), torch.tensor([large, 1.0, 1.0, -large, 1.0])

    monkeypatch.setattr(TorchBackend, "unit_rows_backward", rows_backward)
    x, y = torch.randn(2, ROWS, ranks.WIDTH)
    scale = torch.tensor(1.0, requires_grad=True)
    fastsim.siglip(x, y, scale=scale, group=Ring(alone), backend="torch").backward()
    assert scale.grad == 3


def test_what_a_ring_finds_again_is_not_cast(alone):
    """Its backward pass in a context that casts operands finds what it finds outside."""
    x, y = torch.randn(2, ROWS, ranks.WIDTH).requires_grad_()
    batch = Batch([ROWS], [ROWS], alone, ring=True)

    def products(x, y, _):
        return [torch.mm(x, y.T).square().sum(1)]

    def gradients(enabled):
        (found,) = ring_sum(products, x, y, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(found.sum(), (x, y))

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


@pytest.mark.parametrize("order", [(0, 4), (4, 0)])
def test_the_first_of_equal_columns_is_found_whichever_comes_first(order):
    """By rank 0 those from 0 on are seen first, by rank 1 those from 4 on."""
    seen = {0: ([0.5, 0.5], [3, 2]), 4: ([0.5, 0.2], [1, 0])}
    best, found = torch.full((2,), -torch.inf), torch.full((2,), -1)
    for first in order:
        values, within = map(torch.tensor, seen[first])
        best, found = _larger(best, found, values, within, slice(first, first + 4))
    assert found.tolist() == [3, 2]


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_loss_of_a_group_is_differentiated_once(exchange, alone):
    """A penalty on its gradient would count for nothing if that passed as a constant."""
    x, y = torch.randn(2, ROWS, ranks.WIDTH).requires_grad_()
    chosen = Ring(alone) if exchange == "ring" else alone
    value = fastsim.info_nce(x, y, group=chosen, backend="torch")
    with pytest.raises(RuntimeError, match="which can be differentiated only once"):
        torch.autograd.grad(value, x, create_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_loss_of_a_group_in_a_compiled_step(exchange, alone):
    """It runs as it is, between the graphs of what is around it."""
    x, y = (torch.randn(ROWS, ranks.WIDTH, requires_grad=True) for _ in range(2))
    chosen = Ring(alone) if exchange == "ring" else alone

    def step(x, y):
        return 2 * fastsim.info_nce(3 * x, y.sin(), group=chosen, backend="torch")

    def results(step):
        value = step(x, y)
        return value.detach(), *torch.autograd.grad(value, (x, y))

    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(results(compiled), results(step))


LEARNING = {
    "info_nce": (lambda *sides, **o: fastsim.info_nce(*sides, symmetric=True, **o), "temperature"),
    "siglip": (fastsim.siglip, "scale"),
    "multi_similarity": (
        lambda x, y, **o: fastsim.multi_similarity(x, torch.arange(ROWS) // 2, **o),
        None,
    ),
}


def ring_of_one(name, group):
    """Value and gradients of a loss whose columns travel."""
    loss, learnt = LEARNING[name]
    sides = [t.requires_grad_() for t in torch.randn(2, ROWS, ranks.WIDTH, generator=fresh(5))]
    number = torch.tensor(0.7, requires_grad=True)
    options = {} if learnt is None else {learnt: number}
    value = loss(*sides, group=Ring(group), backend="torch", **options)
    value.backward()
    return [value, *(t.grad for t in (*sides, number) if t.grad is not None)]


@pytest.mark.parametrize("name", LEARNING)
def test_the_loss_scale_of_a_ring_is_taken_out_again(name, alone, monkeypatch):
    """A power of two, as panels of 16 bits want it: it changes no bit of what comes back."""
    wanted = ring_of_one(name, alone)
    power = torch.tensor(2.0**6)
    monkeypatch.setattr(TorchBackend, "loss_scale", lambda *_: power)
    torch.testing.assert_close(ring_of_one(name, alone), wanted, rtol=0, atol=0)
