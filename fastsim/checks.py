"""Checks of arguments. Each error names the argument, what was wanted and what came."""

import math
import operator

import torch
from torch._subclasses import FakeTensor

from fastsim.dtensor import HINT, is_dtensor
from fastsim.operators import transformed

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGRAL = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = ("mean", "sum", "none")
SIMILARITIES = ("cosine", "dot")
_LARGEST = torch.finfo(torch.float32).max  # losses are computed in float32, except for float64


def check_tensor(name, value, *, ndim, dtypes, what, empty=False):
    """`value` is a tensor of `ndim` dimensions with one of `dtypes`.

    what: the words for such a tensor in messages.
    empty: whether it may have no rows, as on one rank of a group.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: wanted a torch.Tensor, got {type(value).__name__}")
    if is_dtensor(value):
        raise TypeError(f"{name}: wanted a plain tensor, got a DTensor; {HINT}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: wanted {what}, got {value.dtype}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name}: wanted a dense tensor (layout torch.strided), got {layout}")
    if value.dim() != ndim:
        raise ValueError(f"{name}: wanted {ndim} dimension(s), got shape {tuple(value.shape)}")
    if value.numel() == 0 and not (empty and value.shape[0] == 0 and value.shape[1:].numel()):
        raise ValueError(f"{name}: wanted at least one element, got shape {tuple(value.shape)}")


def check_embeddings(name, value, *, empty=False):
    """`value` holds embeddings (N, D) of a floating dtype; empty: as for `check_tensor`."""
    what = "floating-point embeddings (N, D)"
    check_tensor(name, value, ndim=2, dtypes=FLOATING, what=what, empty=empty)


def check_scores(name, value, ndim=2, *, empty=False):
    """`value` is a score matrix (N, M) or a list of scores (N,); empty: as for `check_tensor`."""
    what = "floating-point scores"
    check_tensor(name, value, ndim=ndim, dtypes=FLOATING, what=what, empty=empty)


def check_alike(name, value, other_name, other, *, rows=False):
    """`value` has the width, dtype and device of `other`, and with `rows=True` as many rows."""
    if value.shape[-1] != other.shape[-1]:
        raise ValueError(
            f"{name}: wanted width {other.shape[-1]}, that of {other_name}, got {value.shape[-1]}"
        )
    if rows and value.shape[0] != other.shape[0]:
        raise ValueError(
            f"{name}: wanted {other.shape[0]} rows, as many as {other_name}, got {value.shape[0]}"
        )
    if value.dtype != other.dtype:
        raise TypeError(f"{name}: wanted {other.dtype}, that of {other_name}, got {value.dtype}")
    check_device(name, value, other_name, other)


def check_device(name, value, other_name, other):
    """Both tensors are on one device."""
    if value.device != other.device:
        raise ValueError(
            f"{name}: wanted device {other.device}, that of {other_name}, got {value.device}"
        )


def check_enough(name, value, other_name, other):
    """`value` has at least as many rows as `other`, since row i's positive is column i."""
    if value.shape[0] < other.shape[0]:
        raise ValueError(
            f"{name}: wanted at least {other.shape[0]} rows, one per row of {other_name},"
            f" got {value.shape[0]}"
        )


def check_sides(name, value, other_name, other, *, empty=False):
    """Both sides are embeddings of the same width, dtype and device."""
    check_embeddings(other_name, other, empty=empty)
    check_embeddings(name, value, empty=empty)
    check_alike(name, value, other_name, other)


def check_candidates(anchors, candidates, positives, group):
    """Both sides of a loss fit; with positives None, anchor i has candidate i as its positive."""
    check_sides("candidates", candidates, "anchors", anchors, empty=group is not None)
    if positives is None:
        check_enough("candidates", candidates, "anchors", anchors)


def check_columns(scores):
    """Scores (N, M) have at least as many columns as rows, since row i's positive is column i."""
    rows, columns = scores.shape
    if columns < rows:
        raise ValueError(f"scores: wanted at least as many columns as rows, got {rows, columns}")


def check_choice(name, value, choices):
    """`value` is one of `choices`, and no tensor."""
    if isinstance(value, torch.Tensor) or value not in choices:
        raise ValueError(f"{name}: wanted one of {', '.join(map(repr, choices))}, got {value!r}")


def check_flags(**flags):
    """Each value is True or False."""
    for name, value in flags.items():
        check_choice(name, value, (False, True))


def check_reduction(value):
    """`value` is a reduction."""
    check_choice("reduction", value, REDUCTIONS)


def check_similarity(value):
    """`value` is a similarity."""
    check_choice("similarity", value, SIMILARITIES)


def check_number(name, value, *, positive=False, tensor=True):
    """`value` is a number that float32 can hold, or with `tensor` a floating tensor of one.

    positive: whether it has to be greater than 0, with an inverse that float32 can hold.

    The value of a tensor is checked only on a CPU, because reading it elsewhere would wait for the
    device. It is not checked while torch.compile traces: the number then stands for any number.
    """
    wanted = "a number or a floating tensor of shape () or (1,)" if tensor else "a number"
    if tensor and isinstance(value, torch.Tensor):
        if value.shape not in ((), (1,)) or value.dtype not in FLOATING:
            raise ValueError(
                f"{name}: wanted {wanted}, got shape {tuple(value.shape)} of {value.dtype}"
            )
        if not can_be_read(value):
            return
        value = value.item()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        came = type(value)
        package = "numpy." if came.__module__ == "numpy" else ""  # float32 would look like a dtype
        raise TypeError(f"{name}: wanted {wanted}, got {package}{came.__name__}")
    if torch.compiler.is_compiling():
        return
    kind = "positive " if positive else ""
    if isinstance(value, int) and abs(value) > _LARGEST:
        value = math.inf if value > 0 else -math.inf  # an int may be larger than any float
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name}: wanted a {kind}finite number, got {value}")
    least = 1 / _LARGEST if positive else -_LARGEST
    if not least <= value <= _LARGEST:
        limits = f"from {least:.2g} to {_LARGEST:.2g}"
        raise ValueError(f"{name}: wanted a {kind}number {limits}, got {value}")


def check_count(name, value):
    """`value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: wanted a positive int, got {value!r}")


def int_of(name, value, least=None):
    """`value`, an integer of any library but not a bool, as an int of at least `least`."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)
    except TypeError:
        raise TypeError(f"{name}: wanted an int, got {type(value).__name__}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}: wanted at least {least}, got {number}")
    return number


def float_of(name, value):
    """`value`, a number of any library but neither a bool nor a text, as a float."""
    try:
        return float(None if isinstance(value, (bool, str, bytes)) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"{name}: wanted a number, got {type(value).__name__}") from None


def check_integers(name, value, count, device):
    """`value` holds (count,) integers on `device`."""
    check_tensor(name, value, ndim=1, dtypes=INTEGRAL, what="integers", empty=count == 0)
    if value.shape[0] != count:
        raise ValueError(f"{name}: wanted {count} entries, got {value.shape[0]}")
    if value.device != device:
        raise ValueError(f"{name}: wanted device {device}, got {value.device}")


def check_bias(name, value, count, device):
    """`value` holds (count,) finite floats on `device` and requires no gradient, or is None."""
    if value is None:
        return
    what = "floating-point numbers (M,)"
    check_tensor(name, value, ndim=1, dtypes=FLOATING, what=what, empty=count == 0)
    if value.shape[0] != count:
        raise ValueError(f"{name}: wanted {count} numbers, one per column, got {value.shape[0]}")
    if value.device != device:
        raise ValueError(f"{name}: wanted device {device}, got {value.device}")
    check_constant(name, value)
    check_bias_numbers(name, value)


def check_constant(name, value):
    """Raises a ValueError for a tensor that requires a gradient, as it would not get one."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: wanted a tensor without a gradient, as the loss computes none for it,"
            f" got requires_grad=True (use {name}.detach())"
        )


def check_bias_numbers(name, value):
    """All numbers are finite."""
    if without_values(value):
        return
    # Numbers with a finite sum are finite: one operator instead of five.
    if value.device.type == "cpu" and math.isfinite(value.detach().sum()):
        return
    finite = value.isfinite().all()
    if value.device.type != "cpu":
        torch._assert_async(finite)
    elif not finite:
        raise ValueError(
            f"{name}: wanted finite numbers, got {value[~value.isfinite()][0].item()}"
            " (`exclude` leaves candidates out)"
        )


def check_range(name, value, end):
    """Every number lies in [0, end); checked at once on a CPU, by an assertion elsewhere."""
    if without_values(value) or value.numel() == 0:
        return
    if value.device.type != "cpu":
        torch._assert_async(((value >= 0) & (value < end)).all())
        return
    low, high = value.aminmax()
    if not (low >= 0 and high < end):
        raise ValueError(f"{name}: wanted values in [0, {end}), got {low.item()} to {high.item()}")


def check_labels(name, value, count, device):
    """`value` holds (count,) labels of a real or integer dtype, none of them NaN."""
    dtypes = (*FLOATING, *INTEGRAL, torch.bool)
    what = "real or integer labels"
    check_tensor(name, value, ndim=1, dtypes=dtypes, what=what, empty=count == 0)
    if value.shape[0] != count:
        raise ValueError(f"{name}: wanted {count} entries, one per score, got {value.shape[0]}")
    if value.device != device:
        raise ValueError(f"{name}: wanted device {device}, got {value.device}")
    check_order(name, value)


def check_order(name, value):
    """No label is NaN; checked at once on a CPU, by an assertion on the device elsewhere."""
    if value.is_floating_point() and not without_values(value):
        # A NaN makes the sum NaN: one operator instead of two.
        if value.device.type == "cpu" and not math.isnan(value.detach().sum()):
            return
        nan = value.isnan().any()
        if value.device.type != "cpu":
            torch._assert_async(~nan)
        elif nan:
            raise ValueError(f"{name}: wanted labels that can be ordered, got NaN")


def without_values(value):
    """Whether the tensor has no values to read: it is one of torch.compile, of torch.func or of
    `FakeTensorMode`.
    """
    return torch.compiler.is_compiling() or isinstance(value, FakeTensor) or transformed(value)


def can_be_read(value):
    """Whether the values of the tensor can be read without waiting for a device."""
    return value.device.type == "cpu" and not without_values(value)
