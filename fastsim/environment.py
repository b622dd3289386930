"""Environment variables of a block, and of the processes that start in it."""

import contextlib
import os


@contextlib.contextmanager
def variables(values):
    """Within the block the environment has these too; afterwards it is as it was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
