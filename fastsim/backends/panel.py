"""How many scores a panel holds: one option and one environment variable for every backend.

FASTSIM_PANEL_MB, a number of megabytes (2^20 bytes): more of it leaves fewer and larger products,
less of it less memory. Temporary values of a panel's size come on top. The variable is
read at every call.
"""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from fastsim.environment import variables

VARIABLE = "FASTSIM_PANEL_MB"


@contextlib.contextmanager
def panel_size(megabytes: float) -> Iterator[None]:
    """Within the block the panels of every backend have this size.

    A panel is the part of the score matrix that is alive at once. Larger panels leave fewer and
    larger products, smaller ones take less memory; temporary values of a panel's size come on top.
    The default fits the backend and the device. The size is that of the whole process: it sets
    FASTSIM_PANEL_MB, which is read in the forward and in the backward pass, so both belong in the
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
    """The (rows, columns) slices of a matrix in blocks of at most (tall, wide), row by row.

    lower: columns up to a block's first row may be left out; aligned: but for whole multiples.
    """
    for top in range(0, rows, tall):
        first = top // aligned * aligned if lower else 0
        for left in range(first, columns, wide):
            yield slice(top, min(rows, top + tall)), slice(left, min(columns, left + wide))


def panel_bytes(default):
    """Bytes of a panel: what FASTSIM_PANEL_MB says, else `default`.

    ValueError where it says something that is no positive number.
    """
    value = os.environ.get(VARIABLE)
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
    """Bytes of the device's memory; 0 where it does not say."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    module = getattr(torch, device.type, None)
    properties = getattr(module, "get_device_properties", None)
    return 0 if properties is None else getattr(properties(device), "total_memory", 0)
