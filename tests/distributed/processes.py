"""Processes of one group, waited for together: where one fails the others would wait for it."""

import time

LIMIT = 900  # seconds, on a machine that does other things beside


def exit_codes(processes):
    """Of `subprocess.Popen`s, all of which have ended then; -9 of those that were ended here."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]
