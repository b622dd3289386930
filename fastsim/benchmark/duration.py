"""How long a run will take, roughly, said before it begins."""

from dataclasses import replace

import torch

from fastsim.benchmark.cases import UP_TO
from fastsim.benchmark.settings import LARGE_IN
from fastsim.benchmark.timing import in_turns

START = 6.0  # seconds of a fresh process: imports, and what the machine can do
MEMORY = 3.0  # of one call's peak, in a process of its own
ROUNDS = 3  # of a call that takes longer than its share: a warm-up and two
WORK = 2.0  # a call's time over that of its products, in the mean over the contestants
SIDE = 1024  # of the square product whose rate is taken


def minutes(settings):
    """Of a run with these settings: from the products that it makes and the rate of one here."""
    total = 0.0
    if "time" in settings.measures:
        rate = _rate(settings)
        for index in range(max(1, settings.processes)):
            few = settings.processes and index >= LARGE_IN
            part = replace(settings, largest=UP_TO) if few else settings
            total += START + _timed(part, rate)
    if "memory" in settings.measures:
        for case in settings.cases:
            total += MEMORY * len(settings.contestants(case)) * len(settings.memory_sizes_of(case))
    return total / 60


def _timed(settings, rate):
    """Seconds in which every case is timed once at every size, forward and with backward."""
    total = 0.0
    for case in settings.cases:
        count = len(settings.contestants(case))
        for rows in settings.sizes_of(case):
            for width in settings.dims_of(case):
                call = WORK * case.flop(rows, width) / rate
                each = ROUNDS * call if call < settings.limit else 0.0
                total += max(2 * settings.pass_seconds, count * each)
    return total


def _rate(settings):
    """Floating-point operations a second of a product of this device and dtype."""
    square = torch.randn(SIDE, SIDE, device=settings.device).to(settings.operands)

    def product():
        torch.mm(square, square)
        if settings.device == "cuda":
            torch.cuda.synchronize()

    return 2 * SIDE**3 / min(in_turns({"product": product}, seconds=0.1)["product"])
