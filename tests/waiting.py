"""A block in which nothing may wait for the GPU."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def no_waiting():
    """RuntimeError for a call that waits for the device, as far as torch knows of it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
