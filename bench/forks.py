"""Runs a function in a fork of this process, so that all it changes or loads is gone afterwards."""

import json
import os
import tempfile
import traceback
from pathlib import Path


def forked(function, *arguments, seconds, log=os.devnull):
    """function(*arguments), which must fit into JSON, or {"not measured": the reason}.

    seconds: the processor time that it may take. It runs in an empty folder of its own, and its
    output goes to the file `log`.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if not child:
            _child(answer, log, seconds, function, arguments)
        os.waitpid(child, 0)
        if answer.is_file():
            return json.loads(answer.read_text())
        return {"not measured": f"stopped after {seconds} seconds of the processor"}


def _child(answer, log, seconds, function, arguments):
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    work = answer.parent / "work"
    work.mkdir()
    os.chdir(work)
    log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        result = {"not measured": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    answer.write_text(json.dumps(result))
    os._exit(0)
