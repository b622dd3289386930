"""Result rows with the time and the memory of each call."""

from fastsim.benchmark import memory, timing
from fastsim.benchmark.calls import runnable

BOTH_PASSES = "forward + backward"


def rows(about, calls, problem, seconds, peak, *arguments):
    """A row for each call: its times, measured in turns, and its memory in a fresh process.

    calls: {name: call(*leaves)}. peak(name, *arguments) returns megabytes; it runs in that process.
    """
    functions = {name: runnable(call, problem, BOTH_PASSES) for name, call in calls.items()}
    for name, times in timing.in_turns(functions, seconds=seconds).items():
        row = about | {"by": name}
        row |= {"not measured": times} if isinstance(times, str) else timing.summary(times)
        megabytes = memory.in_fresh_process(peak, name, *arguments)
        failed = isinstance(megabytes, str)
        yield row | ({"memory": megabytes} if failed else {"MB": megabytes})


def rise(call, problem, first, small):
    """Megabytes (2^20 bytes) of one call in this process, after a call of a small problem."""
    runnable(first, small, BOTH_PASSES)()
    return round(memory.resident_rise(call, problem) / memory.MIB, 1)
