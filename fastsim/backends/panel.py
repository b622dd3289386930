"""The size of a panel: one option and one environment variable for every backend.

FASTSIM_PANEL_MB is the size in megabytes (2^20 bytes). It is read at every call.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

from fastsim.environment import Variable, variables

VARIABLE = "FASTSIM_PANEL_MB"
_variable = Variable(VARIABLE)


@contextlib.contextmanager
def panel_size(megabytes: float) -> Iterator[None]:
    """Within the block the panels of every backend have this size.

    A panel is the part of the score matrix that is in memory at a time. Larger panels mean fewer
    and larger matrix products, smaller ones less memory; temporary tensors of the size of a panel
    come on top. The default depends on the backend and the device. The block sets FASTSIM_PANEL_MB
    for the whole process. The forward and the backward pass both read it, so both belong in the
    block. A small batch on the CPU has no panels.

    Args:
        megabytes: a positive number, in units of 2^20 bytes.

    Raises:
        TypeError, ValueError: for anything else.

    Example:
        >>> with fastsim.panel_size(64):
        ...     fastsim.info_nce(torch.eye(2), torch.eye(2), temperature=1.0)
        tensor(0.3133)
    """
    if isinstance(megabytes, bool) or not isinstance(megabytes, (int, float)):
        raise TypeError(f"megabytes: wanted a number, got {type(megabytes).__name__}")
    if not 0 < megabytes < float("inf"):
        raise ValueError(f"megabytes: wanted a positive finite number, got {megabytes}")
    with variables({VARIABLE: str(megabytes)}):
        yield


def blocks_within(rows, columns, tall, wide, *, lower=False, aligned=1):
    """Yields the (rows, columns) slices of blocks of at most (tall, wide), band by band.

    lower: leaves out the columns before a block's first row, but begins at a multiple of `aligned`.
    """
    for top in range(0, rows, tall):
        first = top // aligned * aligned if lower else 0
        for left in range(first, columns, wide):
            yield slice(top, min(rows, top + tall)), slice(left, min(columns, left + wide))


def panel_bytes(default):
    """The size of a panel in bytes: FASTSIM_PANEL_MB if it is set, else `default`.

    Raises ValueError if the variable is not a positive number.
    """
    value = _variable.value()
    if not value:
        return default
    try:
        megabytes = float(value)
    except ValueError:
        megabytes = 0.0
    if not 0 < megabytes < float("inf"):
        raise ValueError(f"{VARIABLE}: wanted a positive number of megabytes, got {value!r}")
    return int(megabytes * (1 << 20))


@functools.cache
def memory_of(device):
    """The memory of the device in bytes, 0 if unknown."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    module = getattr(torch, device.type, None)
    properties = getattr(module, "get_device_properties", None)
    return 0 if properties is None else getattr(properties(device), "total_memory", 0)
