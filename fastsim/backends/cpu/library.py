"""The compiled library of the CPU backend: loads it, and checks that these sources built it."""

from pathlib import Path

import torch

from fastsim.backends.base import Backend
from fastsim.backends.cpu.sizes import ALIGNED, TILE_ROWS
from fastsim.batch_metrics import ROW_METRICS, SHARPNESS, TOTALS
from fastsim.kinds.kind import EMPTY

LIBRARY = Path(__file__).parents[2] / "_lib" / "cpu.so"
# A hash of the operators and their signatures: torch.ops.fastsim_cpu.interface() of a library built
# from these sources.
_INTERFACE = 0x6FFA00C70710F63


def _load():
    """Loads the library. None, or a sentence that says why it cannot be used."""
    if not LIBRARY.exists():
        return (
            "the C++ extension was not built; install a C++ compiler and reinstall fastsim"
            " with FASTSIM_BUILD=cpu"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the C++ extension does not load: {error}"
    return None if agrees() else "the C++ extension is of other sources; reinstall fastsim"


def agrees():
    """Whether the library has the operators and constants that the backend expects."""
    library = torch.ops.fastsim_cpu
    if not hasattr(library, "interface") or library.interface() != _INTERFACE:
        return False
    packed = [library.panel_columns(single) for single in (True, False)]
    return (
        library.left_out() == EMPTY
        and library.row_metric_count() == len(ROW_METRICS)
        and library.totals() == len(TOTALS)
        and library.sharpness() == SHARPNESS
        and TILE_ROWS % library.tile_rows() == 0
        and not any(ALIGNED % columns for columns in packed)
    )


def most_levels():
    """`Backend.most_levels` of the library.

    Read once, as torch.compile cannot trace an operator that takes no tensor.
    """
    return Backend.most_levels if UNAVAILABLE else torch.ops.fastsim_cpu.most_levels()


UNAVAILABLE = _load()  # None, or why the library cannot be used
