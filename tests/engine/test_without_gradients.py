"""A loss of which no gradient is wanted: a shorter way to the same number."""

import pytest
import torch

import fastsim
from fastsim.engine import max_sim, triplets
from tests.cases import BY_NAME, CASES, inputs
from tests.losses.rounding import dense_options, moves
from tests.losses.test_losses import truth_of
from tests.measure import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.skipif(fastsim.backends()["cpu"] is not None, reason="needs the C++ extension")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.tile], ids=str)
def test_the_loss_is_the_same_to_the_last_bit(case, dtype):
    """With and without torch.no_grad, and of leaves that want no gradient."""
    tensors, others, options = inputs(case, (13, 29, 18), dtype, seed=torch.initial_seed())
    leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
    with_gradients = case.loss(*leaves, *others, **options, backend="cpu")
    with torch.no_grad():
        without = case.loss(*leaves, *others, **options, backend="cpu")
    plain = case.loss(*tensors, *others, **options, backend="cpu")
    assert with_gradients.requires_grad
    assert not without.requires_grad
    assert without.dtype == with_gradients.dtype
    assert torch.equal(without, with_gradients.detach())
    assert torch.equal(plain, without)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["cosine_regression", "triplet_margin"])
def test_losses_of_paired_rows_equal_the_oracle(name, backend, dtype, reduction, usable):
    """One operator makes and reduces them."""
    usable(backend)
    case, shape, seed = BY_NAME[name], (13, 29, 18), 9
    (truth, *_), size = truth_of(name, dtype, shape, seed, reduction)
    tensors, others, options = inputs(case, shape, dtype, seed)
    compute = torch.promote_types(dtype, torch.float32)
    narrow = [t.to(compute) for t in tensors]
    dense = case.loss(*narrow, *others, **dense_options(case, options, reduction))
    with fastsim.use_backend(backend):
        for _ in range(2):  # the second by what is kept of the first
            got = case.loss(*tensors, *others, **options, reduction=reduction)
            assert got.dtype == compute
            moved = torch.finfo(compute).eps * moves(name, shape, seed, reduction)[0]
            assert_close("value", got, truth, dense, compute, max(size, 1.0), moved)


def test_numbers_are_looked_at_in_every_call(usable):
    """A loss that is kept by signature sees new labels and a new bias."""
    usable("cpu")
    x, y, numbers = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5)
    for _ in range(2):
        fastsim.cosine_regression(x, y, numbers, backend="cpu")
        fastsim.info_nce(x, y, candidate_bias=numbers, backend="cpu")
    for number in (torch.inf, -torch.inf, torch.nan):
        wrong = numbers.index_fill(0, torch.tensor([3]), number)
        with pytest.raises(ValueError, match="candidate_bias: wanted finite numbers"):
            fastsim.info_nce(x, y, candidate_bias=wrong, backend="cpu")
    with pytest.raises(ValueError, match="labels: wanted labels that can be ordered, got NaN"):
        fastsim.cosine_regression(x, y, wrong, backend="cpu")


def test_no_gradient_is_made_without_one_to_keep(monkeypatch):
    """Of rows that want one, too: what makes it is told so."""
    told = []
    for module, name in ((triplets, "_triplets"), (max_sim, "_max_sim")):
        made = getattr(module, name)

        def spied(*arguments, made=made):
            told.append(arguments[-2])  # whether a gradient is wanted
            return made(*arguments)

        monkeypatch.setattr(module, name, spied)
    x = torch.randn(4, 3, 5, requires_grad=True)
    with torch.no_grad():
        fastsim.losses.batch_all_triplet(x.flatten(0, 1), torch.arange(12) // 3)
        fastsim.max_sim(x, x)
    assert told == [False, False]
    fastsim.losses.batch_all_triplet(x.flatten(0, 1), torch.arange(12) // 3)
    fastsim.max_sim(x, x)
    assert told[2:] == [True, True]
