"""open_clip.loss alone: its package imports torchvision, which the losses do not need."""

import importlib.util
import sys

NAME = "open_clip_loss"


def load():
    """The module, or None where open_clip_torch is not installed."""
    found = importlib.util.find_spec("open_clip")
    if found is None:
        return None
    if NAME not in sys.modules:
        path = f"{found.submodule_search_locations[0]}/loss.py"
        spec = importlib.util.spec_from_file_location(NAME, path)
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]
