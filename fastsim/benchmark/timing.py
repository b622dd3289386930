"""Times functions in turns, so that other load on the machine affects all of them alike."""

import statistics
import time

from fastsim.benchmark.calls import reason

REPEATS = 5  # parts into which the rounds are divided; the best time of each is kept


def in_turns(functions, *, seconds, fewest=2, most=200, cold=(), clock=None):
    """{name: [seconds of each round]} of functions that are called in turns.

    Each function is called until it has had its share of `seconds`, at least `fewest` and at most
    `most` times. If a function fails, it is not called again, and its name has the reason, a
    sentence, instead of times. Each function is called once before, without counting it, except
    those named in `cold`. clock: time.perf_counter by default; time.process_time counts the
    processor time of this process alone, whatever other programs run.
    """
    clock = clock or time.perf_counter
    times = {name: [] for name in functions}
    _round({name: f for name, f in functions.items() if name not in cold}, times, clock)
    times = {name: [] if isinstance(past, list) else past for name, past in times.items()}
    share = seconds / max(1, len(functions))
    for _ in range(most):
        due = {
            name: function
            for name, function in functions.items()
            if isinstance(times[name], list)
            and (len(times[name]) < fewest or sum(times[name]) < share)
        }
        if not due:
            break
        _round(due, times, clock)
    return times


def _round(functions, times, clock):
    for name, function in functions.items():
        start = clock()
        try:
            function()
        except Exception as error:  # a baseline may raise anything
            times[name] = reason(error)
        else:
            times[name].append(clock() - start)


def summary(seconds):
    """Entries of a result row: the best of each of up to five parts of the rounds, the median."""
    part = -(-len(seconds) // REPEATS)
    parts = (seconds[begin : begin + part] for begin in range(0, len(seconds), part))
    return {
        "repeats ms": [_milliseconds(min(times)) for times in parts],
        "median ms": _milliseconds(statistics.median(seconds)),
        "rounds": len(seconds),
    }


def _milliseconds(seconds):
    return float(f"{1e3 * seconds:.5g}")
