"""Checks of arguments: what they refuse, and the values at their limits that they let pass."""

import pytest
import torch

import fastsim
from fastsim import checks, losses

X, Y = torch.randn(4, 6), torch.randn(4, 6)
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_rows_are_dense(layout):
    rows = X.to_sparse() if layout == "sparse" else torch.nested.nested_tensor([*X])
    wanted = r"^x: wanted a dense tensor \(layout torch.strided\), got .*" + layout
    with pytest.raises(TypeError, match=wanted):
        fastsim.cosine_similarity(rows)


@pytest.mark.parametrize(
    "check",
    [
        lambda: checks.check_alike("x", X.to(META), "y", Y),
        lambda: checks.check_integers("x", torch.arange(4, device=META), 4, CPU),
        lambda: checks.check_bias("x", torch.empty(4, device=META), 4, CPU),
        lambda: checks.check_labels("x", torch.empty(4, device=META), 4, CPU),
        lambda: fastsim.siglip(X, Y, torch.empty(4, 4, device=META)),
    ],
)
def test_tensors_are_on_one_device(check):
    with pytest.raises(ValueError, match=r"^\w+: wanted device cpu, .*got meta$"):
        check()


def test_scores_have_a_column_for_each_row():
    with pytest.raises(ValueError, match=r"^scores: wanted at least as many .* got \(4, 3\)$"):
        losses.info_nce_from_scores(torch.randn(4, 3))
    assert losses.info_nce_from_scores(torch.randn(4, 4)).isfinite()


def test_a_truth_value_is_no_number():
    for check in (checks.check_number, checks.float_of, checks.int_of):
        with pytest.raises(TypeError, match=r"^x: wanted an? .*, got bool$"):
            check("x", True)


def test_a_number_of_numpy_is_not_called_a_dtype():
    """float32 alone would read as if float32 were not supported."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=r"margin: wanted a number, got numpy\.float32"):
        checks.check_number("margin", numpy.float32(1), tensor=False)
    checks.check_number("margin", numpy.float64(1), tensor=False)


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["above", "below"])
def test_an_int_may_be_larger_than_any_float(value):
    with pytest.raises(ValueError, match=f"got {float('inf') if value > 0 else -float('inf')}$"):
        checks.check_number("x", value)
    with pytest.raises(TypeError, match=r"^x: wanted a number, got int$"):
        checks.float_of("x", value)


def test_only_numbers_are_floats():
    for value in ("1.5", b"2", None, [1.0], torch.ones(2), torch.empty((), device=META)):
        with pytest.raises(TypeError, match=f"^x: wanted a number, got {type(value).__name__}$"):
            checks.float_of("x", value)
    assert checks.float_of("x", torch.tensor(2)) == 2.0


def test_sums_of_numbers_decide_nothing():
    """A sum of finite numbers may be infinite, and one of labels that have an order NaN."""
    largest = torch.finfo(torch.float32).max
    checks.check_bias_numbers("bias", torch.tensor([largest, largest]))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match=f"^bias: wanted finite numbers, got {wrong} "):
            checks.check_bias_numbers("bias", torch.tensor([0.0, wrong]))
    checks.check_order("labels", torch.tensor([torch.inf, -torch.inf]))
    with pytest.raises(ValueError, match=r"^labels: .* got NaN$"):
        checks.check_order("labels", torch.tensor([torch.inf, torch.nan]))


def test_values_lie_in_a_range_without_its_end():
    checks.check_range("x", torch.tensor([0, 2]), 3)
    checks.check_range("x", torch.tensor([], dtype=torch.int64), 3)
    for wrong in ([0, 3], [-1, 2]):
        with pytest.raises(ValueError, match=rf"\[0, 3\), got {wrong[0]} to {wrong[1]}$"):
            checks.check_range("x", torch.tensor(wrong), 3)


def test_where_no_gradient_is_computed_none_is_missed():
    bias = torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        assert fastsim.info_nce(X, Y, candidate_bias=bias).isfinite()
    with pytest.raises(ValueError, match=r"^candidate_bias: wanted a tensor without a gradient"):
        fastsim.info_nce(X, Y, candidate_bias=bias)


def test_targets_are_constants_at_every_call():
    """Also where the call before, of the same tensors, computed no gradient."""
    targets = torch.ones(4, 4, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            assert fastsim.siglip(X, Y, targets).isfinite()
        with pytest.raises(ValueError, match=r"^targets: wanted a tensor without a gradient"):
            fastsim.siglip(X, Y, targets)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU, where an assertion does not wait for its values."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (checks.check_bias_numbers, [0.0, 1.0], [0.0, torch.inf]),
        (checks.check_order, [0.0, torch.inf], [0.0, torch.nan]),
        (lambda *x: checks.check_range(*x, 3), [0, 2], [0, 3]),
        (lambda *x: checks.check_range(*x, 3), [0, 2], [-1, 2]),
    ],
)
def test_values_elsewhere_are_checked_there(check, right, wrong):
    check("x", torch.tensor(right).as_subclass(Elsewhere))
    with pytest.raises(RuntimeError, match="nonzero value, but got zero"):
        check("x", torch.tensor(wrong).as_subclass(Elsewhere))
