"""The rows of a benchmark that takes the time and the memory of each call."""

from fastsim.benchmark import memory, timing
from fastsim.benchmark.calls import runnable

BOTH_PASSES = "forward + backward"


def rows(about, calls, problem, seconds, peak, *given):
    """A row of each call: its times, all in turns, and the peak of a fresh process.

    calls: {name: call of the problem}. peak: of (name, *given), megabytes, run in that process.
    """
    ready = {name: runnable(call, problem, BOTH_PASSES) for name, call in calls.items()}
    for name, found in timing.in_turns(ready, seconds=seconds).items():
        row = about | {"by": name}
        row |= {"not measured": found} if isinstance(found, str) else timing.summary(found)
        above = memory.in_fresh_process(peak, name, *given)
        yield row | ({"memory": above} if isinstance(above, str) else {"MB": above})


def rise(call, problem, first, small):
    """Megabytes (2^20 bytes) of one call in this process, which has made a `small` one first."""
    runnable(first, small, BOTH_PASSES)()
    return round(memory.resident_rise(call, problem) / memory.MIB, 1)
