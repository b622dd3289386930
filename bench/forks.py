"""A function in a fork of this process: what it changes, loads or breaks is gone with it."""

import json
import os
import tempfile
import traceback
from pathlib import Path


def forked(function, *given, seconds, log=os.devnull):
    """function(*given), which JSON can hold, or {"not measured": why it failed}.

    seconds: of the processor that it may take. It runs in an empty folder of its own; what it
    prints goes to the file `log`.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            _child(answer, log, seconds, function, given)
        os.waitpid(child, 0)
        if answer.is_file():
            return json.loads(answer.read_text())
        return {"not measured": f"stopped after {seconds} seconds of the processor"}


def _child(answer, log, seconds, function, given):
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    work = answer.parent / "work"
    work.mkdir()
    os.chdir(work)
    log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        found = function(*given)
    except BaseException as error:
        traceback.print_exc()
        found = {"not measured": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    answer.write_text(json.dumps(found))
    os._exit(0)
