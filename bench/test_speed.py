"""pytest bench: times every loss with fastsim's backends and the baselines.

    pytest bench [--sizes 64,512,2048] [--dims 384] [--device cpu] [-k siglip]

There is a table for each loss, size and pass. --benchmark-json also writes the rate and its share
of the measured ceiling (the library's product at that size). A baseline that is not installed is
skipped with the reason.
"""

import functools

import pytest

from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import PASSES, reason, runnable
from fastsim.benchmark.ceilings import product_rows
from fastsim.benchmark.memory import limited
from fastsim.benchmark.settings import Settings


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    settings = Settings(sizes=option("sizes"), dims=option("dims"), device=option("device"))
    places = [
        pytest.param(
            settings, case, baseline, rows, width, id=f"{case.name}-{baseline.name}-{rows}x{width}"
        )
        for case in settings.cases
        for rows in settings.sizes_of(case)
        for width in settings.dims_of(case)
        for baseline in settings.contestants(case)
        if baseline.up_to is None or rows <= baseline.up_to
    ]
    metafunc.parametrize(("settings", "case", "baseline", "rows", "width"), places)
    metafunc.parametrize("which", PASSES)


@functools.cache
def ceiling(rows, width, device, dtype):
    """GFLOP/s of the library's product at one size."""
    return product_rows(rows, width, device=device, dtype=dtype, seconds=0.2)["GFLOP/s"]


@pytest.mark.filterwarnings("ignore")  # baselines and the packages that they import may warn
def test_speed(benchmark, settings, case, baseline, rows, width, which):
    benchmark.group = f"{case.name}, {rows:,} x {width}, {which}"
    problem = case.problem(rows, width, **settings.problem_options)
    try:
        function = runnable(baseline.call(problem), problem, which)
        with limited(settings.bytes_limit, settings.device):
            function()
            benchmark(function)
    except Exception as error:  # a baseline may raise anything
        if baseline.package == "fastsim" and not isinstance(error, UnavailableError):
            raise
        pytest.skip(reason(error))
    if benchmark.stats and case.products[0]:  # no stats with --benchmark-disable
        rate = case.flop(rows, width, backward=which != "forward") / 1e9 / benchmark.stats["min"]
        benchmark.extra_info["GFLOP/s"] = rate
        top = ceiling(rows, width, settings.device, settings.operands)
        benchmark.extra_info["share of ceiling"] = rate / top
