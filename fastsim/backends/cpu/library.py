"""The compiled library of the CPU backend: whether it is here and of these sources."""

from pathlib import Path

import torch

from fastsim.backends.base import Backend
from fastsim.backends.cpu.sizes import ALIGNED, TILE_ROWS
from fastsim.batch_metrics import SEEN, SHARPNESS, TOTALS
from fastsim.kinds.kind import EMPTY

LIBRARY = Path(__file__).parents[2] / "_lib" / "cpu.so"
# Which operators these sources call and what they take: torch.ops.fastsim_cpu.interface() of a
# library built beside them.
_INTERFACE = 0x6DDEF0454830213B


def _load():
    """None once the library is loaded, else why it cannot be."""
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
    """Whether the library has the operators and constants that the backend counts on."""
    library = torch.ops.fastsim_cpu
    if not hasattr(library, "interface") or library.interface() != _INTERFACE:
        return False
    packed = [library.panel_columns(single) for single in (True, False)]
    return (
        library.left_out() == EMPTY
        and library.observed() == len(SEEN)
        and library.totals() == len(TOTALS)
        and library.sharpness() == SHARPNESS
        and TILE_ROWS % library.tile_rows() == 0
        and not any(ALIGNED % columns for columns in packed)
    )


def most_levels():
    """As the library was built. Read once: torch.compile traces no operator without a tensor."""
    return Backend.most_levels if UNAVAILABLE else torch.ops.fastsim_cpu.most_levels()


UNAVAILABLE = _load()  # a sentence, or None
