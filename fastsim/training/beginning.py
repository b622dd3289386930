"""Where a run begins: from the start, or at a checkpoint of a run with the same options."""

import json

from fastsim.files import OutputError, fingerprint, full_disk_named
from fastsim.training import checkpoints as saved
from fastsim.training import hub
from fastsim.training.options import FREE, GROWING, OF_EVALUATION


def where_to_begin(options, task, checkpoints, process, say):
    """(the state of the run, the checkpoint to continue from or None).

    The state holds the options and what the untrained model gave. process: accelerate's
    `PartialState`. All processes read and evaluate, so that none waits longer than the timeout of
    the group; the main process writes.
    """
    from accelerate.utils import broadcast_object_list

    asked, checkpoint, skipped = check(options, checkpoints, process.num_processes)
    state = {"before": None} if checkpoint is None else saved.read_run(checkpoints)
    if checkpoint is None or (state["before"] is None and task.eval is not None):
        state |= _untrained(task)  # no checkpoint has been loaded yet
    state |= {"asked": asked}
    if skipped:
        say(f"{skipped[0]}; continuing from {checkpoint.name}")
    process.wait_for_everyone()  # all have read what the main process may now remove
    if process.is_main_process:
        if checkpoint is None:
            # Options, data, model, loss and schedule have been checked by now, so that a run that
            # they refuse removes no checkpoints of an earlier run.
            saved.remove_run(checkpoints)
        else:
            saved.remove_unusable(checkpoints, checkpoint)
        _write_run(checkpoints, state)
    (state,) = broadcast_object_list([state])
    return state, checkpoint


def check(options, checkpoints, processes):
    """(the options and data of the run, the checkpoint to continue from or None, why newer ones
    are not used).

    Raises if the run cannot begin, and writes nothing. A run that ended before its first checkpoint
    does not prevent a new one.
    """
    asked = check_options(options, checkpoints, processes)
    data = {
        "data": _fingerprints(options.train),
        "eval_data": None if options.eval is None else _fingerprints(options.eval),
    }
    if not options.resume:
        return asked | data, None, []
    checkpoint, skipped = saved.newest_complete(checkpoints)
    if checkpoint is None:
        raise _no_checkpoint(checkpoints, *skipped[:1])
    _check_same(data, saved.read_run(checkpoints)["asked"])
    return asked | data, checkpoint, skipped


def check_options(options, checkpoints, processes):
    """The options of the run, without its data: the part of `check` that reads no large file."""
    asked = {key: value for key, value in options.as_written().items() if key not in FREE}
    asked["processes"] = processes  # each has its share of a batch and its own random numbers
    written = saved.written(checkpoints)
    if options.resume:
        if not written:
            raise _no_checkpoint(checkpoints)
        was = saved.read_run(checkpoints)["asked"]
        was.setdefault("processes", processes)  # earlier versions did not write it
        _check_same(asked, was)
    elif written and not options.overwrite:
        raise OutputError(
            f"output: {str(checkpoints)!r} holds checkpoints of an earlier run;"
            " --resume continues it, --overwrite starts again"
        )
    return asked


def _no_checkpoint(checkpoints, *reasons):
    reason = "".join(f": {reason}" for reason in reasons)
    return OutputError(f"resume: no complete checkpoint in {str(checkpoints)!r}{reason}")


def _check_same(asked, asked_before):
    had_evaluation = asked_before.get("eval_data") is not None
    for key, value in asked.items():
        was = asked_before.get(key)
        longer = key in GROWING and was is not None and value is not None and value > was
        adds_evaluation = key in OF_EVALUATION and was is None and not had_evaluation
        if value != was and not longer and not adds_evaluation:
            raise ValueError(f"resume: {key}: {_difference(key, value, was)}")


def _difference(key, value, was):
    if key in ("data", "eval_data"):
        name = "eval" if key == "eval_data" else "train"
        got = "none" if value is None else "data of other content"
        return f"wanted the data of this run (--{name}), got {got}"
    if was is None:
        return f"wanted none, as in this run, got {value!r}"
    least = f"{was} or more" if key in GROWING else repr(was)
    got = "none" if value is None else repr(value)
    return f"wanted {least}, as in this run, got {got}"


def _fingerprints(paths):
    paths = [paths] if isinstance(paths, str) else paths
    return [hub.fingerprint(path) if hub.is_hub(path) else fingerprint(path) for path in paths]


def _untrained(task):
    """What the untrained model gives, for comparison at the end.

    `before`: the metrics, None without evaluation data. The rest: `Task.sample`.
    """
    return {"before": None if task.eval is None else task.evaluate(), **task.sample()}


def _write_run(checkpoints, state):
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        with full_disk_named(checkpoints):
            saved.write_whole(checkpoints / saved.RUN, json.dumps(state))
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"checkpoints: {str(checkpoints)!r}: {error.strerror}") from error
