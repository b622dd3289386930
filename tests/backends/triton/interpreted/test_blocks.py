"""How often and in which blocks the Triton backend looks at the scores, under the interpreter."""

import pytest
import torch

from fastsim import losses
from fastsim.backends import get
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.backends.triton.interpreted.test_edges import tile_losses

HALF, SINGLE = torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("in_panels")


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_several_blocks(dtype, monkeypatch):
    """Panels and bands of partials far smaller than the matrix; every other loss for each dtype."""
    from fastsim.backends.triton import backend
    from fastsim.backends.triton.kernels import tile_launches

    x, y = torch.randn(20, 24).to(dtype), torch.randn(40, 24).to(dtype)

    def run():
        found = []
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        for loss in tile_losses(a, b, part=slice(dtype == HALF, None, 2)):
            loss.backward()
            found.append(loss.detach())
        return [*found, a.grad, b.grad]

    whole = run()
    monkeypatch.setattr(backend, "ROW_MULTIPLE", 16)
    monkeypatch.setattr(backend, "PANEL", 1)
    monkeypatch.setattr(backend, "PART_COLUMNS", 32)
    monkeypatch.setattr(tile_launches, "PARTIALS", 1)
    for once, parts in zip(whole, run(), strict=True):
        assert (once - parts).abs().max() <= 8 * torch.finfo(once.dtype).eps * once.abs().max()
    monkeypatch.setattr(backend, "MOST_COLUMNS", 1)  # now the reduction first, then score gradients
    for once, parts in zip(whole, run(), strict=True):
        assert (once - parts).abs().max() <= 8 * torch.finfo(once.dtype).eps * once.abs().max()


def kept_launch(x, y, pairs):
    """A forward pass over all of x and y that keeps the scores: (launch, codes, their ranges,
    unit rows).
    """
    from fastsim.backends.triton.kernels.epilogues.softmax import softmax_forward
    from fastsim.backends.triton.kernels.tile_launches import Launch

    units = [get("triton").unit_rows(t)[0] for t in (x, y)]
    tile = TileLoss("softmax", pairs, torch.tensor(20.0), torch.tensor(0.0))
    run = Launch(pairs, *units, tile=tile)
    block = slice(0, len(x)), slice(0, len(y))
    panel = torch.full((len(x), 64), torch.nan, dtype=HALF)[:, : len(y)]
    ranges = run.ranges(*block)
    planes = run.row_partials(*block, 0.0, 0.0)
    run(*block, softmax_forward, row_out=planes, panel=panel, ranges=ranges)
    return run, panel.view(torch.int16), ranges, units


@pytest.mark.parametrize("noise", [1.0, 1e-3], ids=["any rows", "rows almost parallel"])
def test_kept_scores(noise):
    """Within half a step of the score: range / 65,534 of the row of a tile, its maximum exact."""
    direction = torch.randn(40) if noise < 1 else 0.0
    x, y = ((direction + noise * torch.randn(n, 40)).to(HALF) for n in (21, 45))
    y[7] = x[5]
    ids = torch.randint(0, 6, (21,)), torch.randint(0, 6, (45,))
    pairs = Pairs(torch.arange(21), *ids)
    run, codes, (tops, steps), units = kept_launch(x, y, pairs)
    true = units[0].double() @ units[1].double().T
    apart = (ids[0][:, None] != ids[1]) | torch.eye(21, 45, dtype=torch.bool)
    codes = codes.int() + 32768
    assert torch.equal(codes == 65535, ~apart)
    width = run.width
    for part, first in enumerate(range(0, 45, width)):
        columns = slice(first, first + width)
        for i in range(21):
            wanted = true[i, columns][apart[i, columns]]
            if not len(wanted):
                continue
            spread = wanted.max() - wanted.min()
            top, step = tops[part, i].double(), steps[part, i].double()
            found = top - step * codes[i, columns][apart[i, columns]]
            rounding = 4 * torch.finfo(SINGLE).eps
            assert (found - wanted).abs().max() <= spread / (2 * 65534) + rounding
            assert (found.max() - wanted.max()).abs() <= rounding


def test_one_product_where_scores_are_kept(monkeypatch):
    """A fused pass multiplies once: one launch of the tile kernel a panel."""
    from fastsim.backends.triton.kernels import launching

    launched = []
    run = launching.run
    monkeypatch.setattr(
        launching, "run", lambda kernel, *rest: (launched.append(kernel), run(kernel, *rest))
    )

    def products(loss, *arguments, **options):
        """Launches of the tile kernel in the forward and backward passes of `loss`."""
        launched.clear()
        loss(*arguments, backend="triton", **options).backward()
        return sum(kernel.fn.__name__ == "tile_kernel" for kernel in launched)

    x, y = (torch.randn(20, 12, dtype=HALF, requires_grad=True) for _ in "xy")
    assert products(losses.info_nce, x, y) == 1
    assert products(losses.siglip, x, y) == 1
    assert products(losses.info_nce, x, y, symmetric=True) == 1
    assert products(losses.cosent_matrix, x, y, None) == 1
    assert products(losses.sup_con, x, torch.arange(20) // 2) == 1
    assert products(losses.info_nce, x, y, similarity="dot") == 2
    monkeypatch.setenv("FASTSIM_PANEL_MB", "0.000001")
    assert products(losses.info_nce, x, y, symmetric=True) == 2
    assert products(losses.info_nce, x, y) == 1


def test_dot_products_of_any_range():
    """Two logits near each other, of a row that has one far below: kept in 16 bits, with the
    others of its row, they would be off by a sixth.
    """
    x = torch.tensor([[100.0, 1.0]])
    y = torch.tensor([[100.0, 0.0], [100.0, -0.5], [-100.0, 0.0]])
    found = []
    for backend, dtype in (("triton", HALF), ("eager", torch.float64)):
        leaf = y.to(dtype).requires_grad_()
        losses.info_nce(
            x.to(dtype), leaf, temperature=1.0, similarity="dot", backend=backend
        ).backward()
        found.append(leaf.grad.double())
    # Half a unit in the last place of a score gradient, and of what it becomes.
    rounding = torch.finfo(HALF).eps * found[1].abs().max()
    assert (found[0] - found[1]).abs().max() <= 2 * rounding


def test_half_the_tiles_of_rows_with_themselves(monkeypatch):
    """Folded for rows and columns at once, or, where the partial results are too many, in full."""
    from fastsim.backends.triton.kernels import tile_launches

    rows = 33  # three rows of tiles, two columns
    x, groups = torch.randn(rows, 40, dtype=HALF), torch.randint(0, rows // 3, (rows,))
    matrix = torch.rand(rows, rows)
    common = {"reduction": "none", "backend": "triton"}
    found, mirror = [], tile_launches.Launch.mirror
    monkeypatch.setattr(
        tile_launches.Launch, "mirror", lambda *arguments: found.append(mirror(*arguments))
    )

    def values():
        positives, ids = groups % 7, (groups, groups.flip(0))
        return [
            losses.sup_con(x, groups, **common),
            losses.info_nce(x, x, positives, exclude=ids, **common),
            losses.siglip(x, x, (groups, groups.flip(0)), **common),
            losses.matrix_mse(x, x, matrix, **common),
        ]

    half = values()
    monkeypatch.setattr(tile_launches, "PARTIALS", 1)
    full = values()
    assert found == [True] * 4 + [False] * 4
    for a, b in zip(half, full, strict=True):
        assert (a - b).abs().max() <= 8 * torch.finfo(SINGLE).eps * b.abs().max()


def test_panel_bytes_are_a_number(monkeypatch):
    monkeypatch.setenv("FASTSIM_PANEL_MB", "8GB")
    with pytest.raises(ValueError, match="FASTSIM_PANEL_MB: wanted a positive number of megabytes"):
        losses.info_nce(*(torch.randn(3, 4, requires_grad=True) for _ in "xy"), backend="triton")
