"""How many scores a panel holds: one environment variable for every backend.

FASTSIM_PANEL_MB, a number of megabytes (2^20 bytes): more of it leaves fewer and larger products,
less of it less memory. Temporary values of a panel's size come on top. It is read at every call.
"""

import os

VARIABLE = "FASTSIM_PANEL_MB"


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
