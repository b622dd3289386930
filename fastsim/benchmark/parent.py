"""A process that measures ends with the one that asked it to."""

import multiprocessing
import os
import threading
from multiprocessing import connection


def end_with_parent():
    """In a process of a pool: from now on it ends when the process that began it is gone.

    A process that was killed, by SIGTERM too, cannot end its pool, which would wait for the next
    task for good.
    """
    threading.Thread(target=_watch, daemon=True).start()


def _watch():
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
