"""Environment variables of a block, and of the processes that start in it."""

import contextlib
import os
import threading

_lock = threading.Lock()
_open = []  # blocks, the last to begin last: {name: its value before the block, or None}


@contextlib.contextmanager
def variables(values):
    """Within the block the environment has these too; afterwards it is as it was.

    Blocks of several threads may overlap: the environment is that of the last to begin, and as it
    was before them all once the last has ended.
    """
    with _lock:
        before = {name: os.environ.get(name) for name in values}
        _open.append(before)
        os.environ.update(values)
    try:
        yield
    finally:
        with _lock:
            _end(before)


def _end(block):
    place = next(index for index, other in enumerate(_open) if other is block)
    del _open[place]
    for name, value in block.items():
        later = next((other for other in _open[place:] if name in other), None)
        if later is not None:  # which began with this block's value
            later[name] = value
            continue
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
