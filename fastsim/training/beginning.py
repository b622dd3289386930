"""Decides where a run begins: at the start, or at a checkpoint of a run with the same options."""

import json

from fastsim.files import OutputError, fingerprint, full_disk_named
from fastsim.training import checkpoints as saved
from fastsim.training import hub
from fastsim.training.options import MAY_BE_ADDED, MAY_DIFFER, MAY_GROW


def where_to_begin(options, task, checkpoints, process, say):
    """(the state of the run, the checkpoint to continue from or None).

    The state holds the options, and the results of the untrained model. process: accelerate's
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
    process.wait_for_everyone()  # all have read the files that the main process may remove now
    if process.is_main_process:
        if checkpoint is None:
            # Options, data, model, loss and schedule have been checked before, so that a run that
            # is refused removes no checkpoints of an earlier run.
            saved.remove_run(checkpoints)
        else:
            saved.remove_unusable(checkpoints, checkpoint)
        _write_run(checkpoints, state)
    (state,) = broadcast_object_list([state])
    return state, checkpoint


def check(options, checkpoints, processes):
    """(options and data of the run, the checkpoint to continue from or None, reasons).

    The reasons say why newer checkpoints are not used. Raises an error if the run cannot begin;
    writes nothing. A run that ended before its first checkpoint does not prevent a new one.
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
    asked = {key: value for key, value in options.as_written().items() if key not in MAY_DIFFER}
    asked["processes"] = processes  # each has its share of a batch and its own random numbers
    written = saved.written(checkpoints)
    if options.resume:
        if not written:
            raise _no_checkpoint(checkpoints)
        asked_before = saved.read_run(checkpoints)["asked"]
        asked_before.setdefault("processes", processes)  # earlier versions did not write it
        _check_same(asked, asked_before)
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
    """ValueError unless the options are those of the run before, or may differ from them."""
    had_evaluation = asked_before.get("eval_data") is not None
    for key, value in asked.items():
        before = asked_before.get(key)
        both_set = before is not None and value is not None
        is_longer = key in MAY_GROW and both_set and value > before
        adds_evaluation = key in MAY_BE_ADDED and before is None and not had_evaluation
        if value != before and not is_longer and not adds_evaluation:
            raise ValueError(f"resume: {key}: {_difference(key, value, before)}")


def _difference(key, value, before):
    """How an option differs from that of the run before, for a message."""
    if key in ("data", "eval_data"):
        name = "eval" if key == "eval_data" else "train"
        got = "none" if value is None else "data of other content"
        return f"wanted the data of this run (--{name}), got {got}"
    if before is None:
        return f"wanted none, as in this run, got {value!r}"
    wanted = f"{before} or more" if key in MAY_GROW else repr(before)
    got = "none" if value is None else repr(value)
    return f"wanted {wanted}, as in this run, got {got}"


def _fingerprints(paths):
    paths = [paths] if isinstance(paths, str) else paths
    return [hub.fingerprint(path) if hub.is_hub(path) else fingerprint(path) for path in paths]


def _untrained(task):
    """The results of the untrained model, to compare the trained one with.

    `before`: the metrics, None without evaluation data. The other entries: `Task.sample`.
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
