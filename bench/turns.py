"""Timing of rivals in turns, so that whatever else the machine does falls on all of them."""

import time


def in_turns(rivals, rounds):
    """{name: [seconds of each round]} of callables run one after the other, a warm-up left out."""
    times = {name: [] for name in rivals}
    for function in rivals.values():
        function()
    for _ in range(rounds):
        for name, function in rivals.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times
