"""What a backend offers the engine, a file for each part of it."""

from fastsim.backends.base.lists import Lists
from fastsim.backends.base.one_call import InOneCall
from fastsim.backends.base.paired_rows import PairedRows
from fastsim.backends.base.panels import Panels
from fastsim.backends.base.prefixes import Prefixes
from fastsim.backends.base.rows import Rows
from fastsim.backends.base.selection import Selection
from fastsim.backends.base.serving import Serving


class Backend(Serving, Rows, Panels, InOneCall, Prefixes, Selection, PairedRows, Lists):
    """One way to run the passes of the engine.

    What has no formula here raises NotImplementedError until a backend has it.
    """
