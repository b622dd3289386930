"""A rough estimate of how long a run will take, shown before it begins."""

from dataclasses import replace

import torch

from fastsim.benchmark.cases import LARGEST_COMMON_SIZE
from fastsim.benchmark.settings import LARGE_PROCESSES
from fastsim.benchmark.timing import in_turns

START = 6.0  # seconds that a fresh process takes to import packages and measure ceilings
MEMORY = 3.0  # seconds to measure one call's peak memory in a fresh process
ROUNDS = 3  # of a call that takes longer than its share of the time: a warm-up and two rounds
WORK = 2.0  # the time of a call over that of its products, averaged over the contestants
SIDE = 1024  # rows and columns of the square product whose rate is measured


def minutes(settings):
    """The minutes of a run with these settings: its products over the rate of a product here."""
    total = 0.0
    if "time" in settings.measures:
        rate = _rate(settings)
        for index in range(max(1, settings.processes)):
            small_only = settings.processes and index >= LARGE_PROCESSES
            part = replace(settings, largest=LARGEST_COMMON_SIZE) if small_only else settings
            total += START + _timing_seconds(part, rate)
    if "memory" in settings.measures:
        for case in settings.cases:
            total += MEMORY * len(settings.contestants(case)) * len(settings.memory_sizes_of(case))
    return total / 60


def _timing_seconds(settings, rate):
    """The seconds to time every case once at every size, forward and forward + backward."""
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
    """Floating-point operations per second of a product on this device in this dtype."""
    square = torch.randn(SIDE, SIDE, device=settings.device).to(settings.operands)

    def product():
        torch.mm(square, square)
        if settings.device == "cuda":
            torch.cuda.synchronize()

    return 2 * SIDE**3 / min(in_turns({"product": product}, seconds=0.1)["product"])
