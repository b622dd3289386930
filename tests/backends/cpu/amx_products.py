"""What test_amx.py runs in a process that has products of bfloat16 operands, or an emulation."""

import os

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.cpu import amx
from fastsim.backends.cpu.lazy_rows import LazyUnitRows
from tests.allocations import allocations
from tests.threads import assert_same_bits

DTYPES = [d for d in (torch.float32, torch.bfloat16, torch.float16) if amx.parts(d)]
several_parts = pytest.mark.skipif(
    not amx.is_matrix_unit(), reason="operands of several parts are multiplied in float32"
)
SHAPES = [(1, 1, 1), (33, 47, 31), (64, 96, 64), (70, 300, 100), (300, 70, 33)]


@pytest.fixture(params=[True, False], ids=["packed once", "in parts"])
def packed(request, monkeypatch):
    """Right operands packed once, or 64 rows or columns of them for every panel."""
    if not request.param:
        monkeypatch.setattr(amx, "CACHED", 0)
        monkeypatch.setattr(amx, "DEPTH", 64)


def problem(rows, columns, width, dtype):
    # Norms over the range of the dtype's exponents, in which no product may leave float32's.
    spread = 3 if dtype == torch.float16 else 25
    sizes = 10.0 ** torch.empty(rows + columns, 1).uniform_(-spread / 2, spread / 2)
    rows_of_both = (torch.randn(rows + columns, width) * sizes).to(dtype)
    return rows_of_both[:rows], rows_of_both[rows:]


def unit(x):
    """Unit rows in float64; zero rows stay zero."""
    x = x.double()
    norms = x.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, x / torch.where(norms > 0, norms, 1.0), 0.0)


def panel_of(x, y):
    """The score panel of all rows and columns, and the operands."""
    rows, columns = (get("cpu").tile_rows(side)[0] for side in (x, y))
    return scores_of(rows, columns), rows, columns


def scores_of(rows, columns):
    """The score panel of all of two operands."""
    backend = get("cpu")
    (block,) = backend.blocks(len(rows), len(columns), torch.device("cpu"))
    return backend.scores(rows, columns, block, backend.workspace(rows, columns))


def parts(x, count):
    """x as the sum of `count` bfloat16 numbers, by torch's own rounding, in float64."""
    rest, total = x.double(), 0.0
    for _ in range(count):
        part = rest.bfloat16().double()
        rest, total = rest - part, total + part
    return total


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def test_in_use():
    wish = os.environ.get("FASTSIM_AMX", "amx")
    wanted = "amx_emulated" if wish == "emulated" else wish
    assert amx.name() == wanted
    assert f" on {wanted}" in get("cpu").note()
    assert torch.bfloat16 in DTYPES
    assert amx.is_matrix_unit() == (wanted != "avx512_bf16") == (torch.float32 in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("packed")
def test_scores_and_products(shape, dtype):
    """No further from float64 than float32 products of unit rows, or than one rounding."""
    x, y = problem(*shape, dtype)
    unit_x, unit_y = unit(x), unit(y)
    panel, rows, columns = panel_of(x, y)
    exact = unit_x @ unit_y.T
    dense = unit_x.float() @ unit_y.float().T
    eps = torch.finfo(torch.float32).eps
    assert largest(panel - exact) <= 2 * (largest(dense - exact) + eps * largest(exact))

    grads = torch.randn(panel.shape)
    panel.copy_(grads)
    # Two parts of a 16-bit input's gradients keep 16 bits; those of float32 all.
    kept = eps if dtype == torch.float32 else 2.0**-16
    for right, out, operand, transposed in (
        (columns, torch.empty(x.shape), unit_y, False),
        (rows, torch.empty(y.shape), unit_x, True),
    ):
        left = panel.t() if transposed else panel
        exact = left.double() @ operand
        dense = left @ operand.float()
        size = largest(left.double().abs() @ operand.abs())
        allowed = 2 * (largest(dense - exact) + kept * size)
        get("cpu").multiply(left, right, out, accumulate=False)
        assert largest(out - exact) <= allowed
        get("cpu").multiply(left, right, out, accumulate=True)
        assert largest(out - 2 * exact) <= 2 * allowed


def test_products_of_a_block_take_no_memory():
    """What a block's rows are packed into is used again by the next."""
    x, y = problem(300, 200, 64, DTYPES[0])
    panel, rows, _ = panel_of(x, y)
    out, block = torch.empty(200, 64), slice(0, 150)
    left, multiply = panel[block].t(), get("cpu").multiply
    assert not allocations(lambda: multiply(left, rows[block], out, accumulate=False))
    assert allocations(lambda: multiply(panel.t(), rows, out, accumulate=False)) == 1  # kept
    assert not allocations(lambda: multiply(panel.t(), rows, out, accumulate=False))


@several_parts
def test_a_guide_is_packed_in_memory_of_its_own(monkeypatch):
    """Unit rows that are made to be packed for every panel again."""
    guide = LazyUnitRows(torch.randn(300, 40))
    rows, (once, again) = guide[:90], torch.empty(2, 90, 300)
    amx.PackedColumns(guide).scores(rows, 0, once, False)
    monkeypatch.setattr(amx, "CACHED", 0)
    monkeypatch.setattr(amx, "DEPTH", 64)
    columns = amx.PackedColumns(guide)
    assert not columns.packed_once
    assert not allocations(lambda: columns.scores(rows, 0, again, False))
    assert torch.equal(again, once)


def test_the_first_widths_stay_packed(monkeypatch):
    """Rows of several widths have the room of one; those that are packed again give the same."""
    given = [torch.randn(70, width).to(DTYPES[0]) for width in (32, 64, 16)]
    widths = [get("cpu").tile_rows(rows)[0] for rows in given]
    monkeypatch.setattr(amx, "CACHED", 96 * 96 * 2 * amx.parts(DTYPES[0]))  # of the first two
    amx.keep_first(widths)
    panel = torch.randn(30, 70)
    for rows, kept in zip(widths, (True, True, False), strict=True):
        before, found = torch.empty(2, 30, rows.shape[1])
        get("cpu").multiply(panel, rows, before, accumulate=False)
        assert (rows.right() is not None) == kept
        rows.keeps, rows._right = not kept, None
        get("cpu").multiply(panel, rows, found, accumulate=False)
        assert torch.equal(found, before)


@several_parts
def test_highest_is_more_accurate_than_float32_products():
    x, y = problem(257, 300, 384, torch.float32)
    exact = unit(x) @ unit(y).T
    error = (panel_of(x, y)[0] - exact).norm()
    assert error < (unit(x).float() @ unit(y).float().T - exact).norm()


@pytest.mark.parametrize(
    ("name", "count"), [pytest.param("high", 2, marks=several_parts), ("medium", 1)]
)
def test_float32_precision(name, count, precision):
    """As far from float64 as the parts that the precision keeps."""
    x, y = problem(120, 90, 100, torch.float32)
    exact = unit(x) @ unit(y).T
    kept = parts(unit(x), count) @ parts(unit(y), count).T
    precision(name)
    error = largest(panel_of(x, y)[0] - exact)
    assert error <= 4 * largest(kept - exact)  # the product of the smallest parts is left out
    precision("highest")
    assert error > 4 * largest(panel_of(x, y)[0] - exact)


def test_sixteen_bit_rows_are_multiplied_exactly(precision):
    """A cosine has the rounding of the sum alone."""
    for dtype in {*DTYPES} - {torch.float32}:
        x, y = problem(100, 90, 200, dtype)
        exact = unit(x) @ unit(y).T
        rounded = unit(x).float() @ unit(y).float().T
        assert (panel_of(x, y)[0] - exact).norm() < (rounded - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["tile_rows", "plain_rows"])
def test_the_float32_setting_has_no_say_in_sixteen_bit_rows(rows, dtype, precision):
    """Whether these have parts of their own or are multiplied in float32."""
    sides, grads = problem(100, 90, 200, dtype), torch.randn(100, 90)
    found = []
    for name in ("highest", "medium"):
        precision(name)
        x, y = (getattr(get("cpu"), rows)(side)[0] for side in sides)
        out = torch.empty(100, 200)
        get("cpu").multiply(grads, y, out, accumulate=False)
        found.append((scores_of(x, y).clone(), out))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_rows_as_they_are(dtype):
    """Dot products of rows of all sizes, one of them not finite, and what multiplies them."""
    x, y = problem(70, 90, 100, dtype)
    x[3], y[5, 7] = 0, torch.inf
    operands = [get("cpu").plain_rows(side)[0] for side in (x, y)]
    found, exact = scores_of(*operands), x.double() @ y.double().T
    finite = [j for j in range(90) if j != 5]
    assert not found[:, 5].isfinite().any()
    size = x.double().abs() @ y.double().abs().T
    allowed = 101 * torch.finfo(torch.float32).eps * size
    assert ((found - exact).abs() <= allowed)[:, finite].all()

    grads, out = torch.randn(70, 90), torch.empty(90, 100)
    get("cpu").multiply(grads.t(), operands[0], out, accumulate=False)
    exact, size = grads.double().T @ x.double(), grads.double().abs().T @ x.double().abs()
    # Two parts of a score gradient hold 16 bits.
    assert ((out - exact).abs() <= (2.0**-16 + 71 * torch.finfo(torch.float32).eps) * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("packed")
def test_zero_rows_and_extreme_norms(dtype):
    x, y = problem(40, 40, 64, dtype)
    x[3] = 0
    y[5] = 0
    kind = torch.finfo(dtype)
    x[4] = torch.tensor([kind.tiny, -kind.tiny] * 32).to(dtype)
    y[6] = torch.tensor([kind.max / 16, kind.max / 32] * 32).to(dtype)
    panel = panel_of(x, y)[0]
    assert not panel[3].any()
    assert not panel[:, 5].any()
    exact = unit(x) @ unit(y).T
    dense = unit(x).float() @ unit(y).float().T
    allowed = 2 * (largest(dense - exact) + torch.finfo(torch.float32).eps)
    assert largest(panel - exact) <= allowed


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.usefixtures("packed")
def test_not_finite(value):
    """A cosine is NaN; a product of rows as they are is what float32 products give."""
    x, y = problem(40, 70, 33, torch.float32)
    x[7, 2] = value
    panel = panel_of(x, y)[0]
    assert panel[7].isnan().all()
    assert panel[8:].isfinite().all()
    x, y = torch.randn(40, 33), torch.randn(70, 33)
    x[7, 2] = value
    found, plain = scores_of(x, y)[7], (x @ y.T)[7]
    assert torch.equal(found, plain) or value != value
    assert found.isnan().all() == plain.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("packed")
def test_same_bits_with_any_number_of_threads(dtype):
    x, y = problem(150, 700, 64, dtype)

    def results():
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        loss = fastsim.info_nce(*leaves, backend="cpu")
        loss.backward()
        return [loss.detach(), *(t.grad for t in leaves)]

    assert_same_bits(results, (1, 3, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"symmetric": True}], ids=["rows", "both"])
@pytest.mark.usefixtures("packed")
def test_losses(dtype, options):
    """Through the panels, which small batches go past: error at most twice that of eager torch."""
    rows = 1100
    x = torch.randn(rows, 16)
    y = x + torch.randn(rows, 16)
    given = [x.to(dtype), y.to(dtype)]
    truth = [t.double().requires_grad_() for t in given]
    wanted = fastsim.info_nce(*truth, **options, backend="eager")
    wanted.backward()
    errors = {}
    for backend in ("cpu", "eager"):
        leaves = [t.clone().requires_grad_() for t in given]
        loss = fastsim.info_nce(*leaves, **options, backend=backend)
        loss.backward()
        off = [
            ((a.grad - b.grad).norm() / b.grad.norm()).item()
            for a, b in zip(leaves, truth, strict=True)
        ]
        errors[backend] = [abs(loss.item() - wanted.item()) / wanted.item(), *off]
    eps = torch.finfo(torch.float32).eps
    for mine, theirs in zip(errors["cpu"], errors["eager"], strict=True):
        assert mine <= 2 * (theirs + 4 * eps)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_rows_of_one_number_with_any_stride(similarity):
    """`contiguous` leaves the stride of a dimension of one number as it is."""
    one, other = torch.randn(2, 1, 8).bfloat16()
    sides = [one.T, other.T]
    assert sides[0].stride(1) != 1
    found, wanted = (
        fastsim.info_nce(x, y, similarity=similarity, reduction="none", backend="cpu")
        for x, y in (sides, [side.clone(memory_format=torch.contiguous_format) for side in sides])
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["highest", "medium"])
def test_prefixes_of_float32_rows(name, precision):
    """At "highest" they stay float32: products of three parts would make a sweep slower."""
    precision(name)
    rows, _ = get("cpu").prefix_rows(torch.randn(5, 8), torch.zeros(5, dtype=torch.float64))
    assert isinstance(rows, torch.Tensor) == (name == "highest")
