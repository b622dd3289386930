"""Losses over many panels, of whole rows and of columns too, and what decides their size."""

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.torch import panels
from tests.cases import BY_NAME, CASES, call, inputs
from tests.losses.test_losses import compare

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TILES = [case for case in CASES if case.tile]
FEWEST = {"whole rows": 1, "columns too": 16}  # rows of a block of whole rows


@pytest.fixture(params=FEWEST)
def many_panels(request, monkeypatch):
    """Panels of 64 scores, of whole rows or of at most 4 columns."""
    monkeypatch.setattr(panels, "CPU_PANEL", 256)
    monkeypatch.setattr(panels, "FEWEST_ROWS", FEWEST[request.param])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_equals_the_oracle(case, reduction, many_panels):
    shape = (13, 29, 18) if case.largest < 10_000 else (26, 41, 18)
    extra = {"reduction": reduction} if case.reduces else {}
    compare(case, "torch", torch.float64, shape, seed=9, **extra)


@pytest.mark.parametrize("columns", [29, 65])
def test_blocks_cover_the_matrix_once(columns, many_panels):
    seen = torch.zeros(26, columns)
    backend = get("torch")
    for rows, part in backend.blocks(26, columns, CPU):
        seen[rows, part] += 1
        assert seen[rows, part].numel() <= 64
    assert (seen == 1).all()
    whole = list(backend.blocks(26, columns, CPU, whole_rows=True))
    assert all(part == slice(0, columns) for _, part in whole)


def test_more_levels_than_are_looked_at_one_by_one(small_panels):
    x, y = (torch.randn(12, 6, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 40, (12, 12))
    results = [
        call(fastsim.cosent_matrix, [x, y], [targets], {"backend": name})
        for name in ("torch", "eager")
    ]
    (value, grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(grads, wanted_grads)


def test_the_variable_sets_the_size(monkeypatch):
    monkeypatch.setenv("FASTSIM_PANEL_MB", "0.5")
    assert panels.panel_scores(CPU) == 1 << 17
    monkeypatch.setenv("FASTSIM_PANEL_MB", "many")
    tensors, others, options = inputs(BY_NAME["siglip"], (5, 7, 4), torch.float32, seed=1)
    with pytest.raises(ValueError, match=r"FASTSIM_PANEL_MB: wanted a positive number .* 'many'"):
        fastsim.siglip(*tensors, *others, **options, backend="torch")


def test_the_option_sets_the_size_within_its_block():
    before = panels.panel_scores(CPU)
    with fastsim.panel_size(0.5):
        assert panels.panel_scores(CPU) == 1 << 17
        with fastsim.panel_size(2):
            assert panels.panel_scores(CPU) == 1 << 19
        assert panels.panel_scores(CPU) == 1 << 17
    assert panels.panel_scores(CPU) == before


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), ("8", TypeError)])
def test_the_option_is_a_positive_number(value, error):
    with pytest.raises(error, match="megabytes: wanted"), fastsim.panel_size(value):
        pass


@pytest.fixture
def products(monkeypatch):
    """Sets what a product of 16-bit matrices does on a GPU."""

    def do(product):
        monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: product(left, out_dtype))

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    panels._half_products.cache_clear()
    yield do
    panels._half_products.cache_clear()


def refused(rows, dtype):
    raise RuntimeError("not implemented")


def short_of_memory(rows, dtype):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_is_short_is_no_answer(products):
    """The next call asks again; any other failure is an answer for good."""
    products(short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        panels.half_products(GPU)
    products(torch.Tensor.to)
    assert panels.half_products(GPU)
    products(refused)
    assert panels.half_products(GPU)
    assert not panels.half_products(GPU, torch.bfloat16)
    products(torch.Tensor.to)
    assert not panels.half_products(GPU, torch.bfloat16)


def test_sums_of_16_bits_are_another_question(products):
    products(torch.Tensor.to)
    assert panels.half_products(GPU)
    products(refused)
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert not panels.half_products(GPU)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert panels.half_products(GPU)
