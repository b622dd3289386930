"""Ends a process that measures when its parent process ends."""

import multiprocessing
import os
import threading
from multiprocessing import connection


def end_with_parent():
    """Ends this process, one of a pool, as soon as its parent process is gone.

    A parent that is killed, by SIGTERM too, cannot end its pool, which would wait for the next task
    forever.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch():
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
