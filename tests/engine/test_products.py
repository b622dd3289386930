"""How many products of the score matrix a loss computes, as `fastsim plan` assumes: counted."""

import pytest
import torch
import torch.distributed as dist

import fastsim
from fastsim.cli.products import PRODUCTS
from fastsim.distributed import Ring

ROWS, COLUMNS, WIDTH = 61, 63, 11  # of which a panel holds whole rows, and none all


@pytest.fixture
def alone():
    """A group of this process alone, whose columns go nowhere."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def multiplied(monkeypatch):
    """[multiply-adds] of the library products."""
    found = []

    def counting(product):
        def counted(*operands, **options):
            left, right = operands[-2:]
            found.append(left.shape[0] * left.shape[1] * right.shape[1])
            return product(*operands, **options)

        return counted

    monkeypatch.setattr(torch, "mm", counting(torch.mm))
    monkeypatch.setattr(torch.Tensor, "addmm_", counting(torch.Tensor.addmm_))
    return found


def loss_named(name):
    """(function of the two sides, columns)."""
    kind, *rest = name.split()
    loss = getattr(fastsim, kind)
    groups = torch.arange(ROWS) % 5, torch.arange(COLUMNS) % 5
    if rest:
        return lambda x, y, **options: loss(x, y, **{rest[0]: True}, **options), COLUMNS
    if kind == "batch_hard_triplet":
        return lambda x, _, **options: loss(x, groups[0], **options), ROWS
    if kind in ("sup_con", "nt_xent", "multi_similarity", "circle"):
        return lambda x, y, **options: loss(x, groups[0], y, groups[1], **options), COLUMNS
    if kind in ("siglip", "matrix_cross_entropy", "matrix_mse", "cosent_matrix"):
        targets = torch.randint(-1, 2, (ROWS, COLUMNS)).float()
        return lambda x, y, **options: loss(x, y, targets, **options), COLUMNS
    return loss, COLUMNS


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_and_backward(name, exchange, alone, multiplied, small_panels, in_passes):
    loss, columns = loss_named(name)
    sides = [torch.randn(rows, WIDTH, requires_grad=True) for rows in (ROWS, COLUMNS)]
    group = Ring(alone) if exchange == "ring" else None
    loss(*sides, group=group, backend="torch").backward()
    wanted = PRODUCTS[name][exchange == "ring"] * ROWS * columns * WIDTH
    if (name, exchange) == ("full_triplet", "ring"):
        wanted += ROWS * ROWS * WIDTH  # the positives first, of the rank's own columns alone
    assert sum(multiplied) == wanted
