"""Times of baselines taken in turns, so that whatever else the machine does falls on all of
them.
"""

import statistics
import time

from fastsim.benchmark.calls import reason

REPEATS = 5  # parts of a run whose best times are kept, for the spread


def in_turns(functions, *, seconds, fewest=2, most=200, warm_up=True, clock=None):
    """{name: [seconds of each round]} of functions called one after the other.

    Each goes on until it has had its share of `seconds`, with at least `fewest` rounds and
    at most `most`. warm_up: each is called once before, which is left out. A function that fails is
    left out of the rest; its name then has the reason, a sentence, in place of times. clock:
    time.perf_counter by default; time.process_time counts the processor's seconds of this process
    alone, whatever runs beside.
    """
    clock = clock or time.perf_counter
    times = {name: [] for name in functions}
    if warm_up:
        _round(functions, times, clock)
        times = {name: [] if isinstance(found, list) else found for name, found in times.items()}
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
        except Exception as error:  # a baseline's own, of any kind
            times[name] = reason(error)
        else:
            times[name].append(clock() - start)


def summary(seconds):
    """What a result row keeps of the rounds: the best of each of up to five parts, the median."""
    part = -(-len(seconds) // REPEATS)
    parts = (seconds[begin : begin + part] for begin in range(0, len(seconds), part))
    return {
        "repeats ms": [_milliseconds(min(times)) for times in parts],
        "median ms": _milliseconds(statistics.median(seconds)),
        "rounds": len(seconds),
    }


def _milliseconds(seconds):
    return float(f"{1e3 * seconds:.5g}")
