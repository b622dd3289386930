"""What `fastsim bench` measures: every loss, and baselines that compute the same."""

import itertools
import math

import pytest
import torch

import fastsim
from fastsim.benchmark.accuracy import errors
from fastsim.benchmark.baselines import BASELINES
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.cases import CASES, DIMS, SIZES
from fastsim.benchmark.run import Session
from fastsim.benchmark.settings import Settings

ROWS, WIDTH = 24, 10
PAIRS = [(baseline, loss) for baseline in BASELINES.values() for loss in baseline.losses]


def test_every_loss_is_measured():
    losses = {*fastsim.losses.SPECIFICATIONS, fastsim.angle, fastsim.triplet_margin}
    losses -= {fastsim.late_interaction}  # of sets of tokens: python -m bench.late_interaction
    assert losses <= {case.function for case in CASES.values()}
    assert set(BASELINES["eager torch"].losses) == set(CASES)


@pytest.mark.parametrize(("baseline", "loss"), PAIRS, ids=lambda part: getattr(part, "name", part))
def test_a_baseline_computes_the_same_loss(baseline, loss):
    if baseline.name == "torch.compile":
        pytest.skip("compiling takes longer than all the other tests; its formula is eager's")
    problem = CASES[loss].problem(ROWS, WIDTH, dtype=torch.float64, seed=torch.seed() % 2**31)
    try:
        found = errors(baseline.call(problem), problem)
    except UnavailableError as error:
        pytest.skip(f"{baseline.name}: {error}")
    # Sums of so many terms, of logits up to 20.
    rounding = 20 * ROWS * WIDTH * torch.finfo(torch.float64).eps
    # Some take torch's softplus, which leaves out log(1 + exp(-x)) from x = 20 on.
    assert max(found.values()) < rounding + math.exp(-20)


def test_the_same_inputs_for_all():
    first, second = (CASES["siglip"].problem(ROWS, WIDTH) for _ in range(2))
    assert all(map(torch.equal, first.leaves, second.leaves))
    other = CASES["siglip"].problem(ROWS, WIDTH, seed=1)
    assert not torch.equal(first.leaves[0], other.leaves[0])


def planned(settings):
    """{(measure, loss, N, D)} of the steps of a run."""
    session = Session(settings)
    return {
        (step.function.__name__, step.arguments[0].name, *step.size)
        for step in session.steps()
        if step.function in (session.time, session.memory)
    }


def test_the_default_run_covers_all_sizes():
    steps = planned(Settings())
    headlines = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")
    places = itertools.product(headlines, SIZES, DIMS)
    assert {("time", *place) for place in places} <= steps
    assert {loss for _, loss, *_ in steps} == set(CASES)
    tile = [name for name, case in CASES.items() if case.products[1]]
    assert {("memory", name, 2048, DIMS[0]) for name in tile} <= steps
    # One matrix alone is beyond the limit there.
    (beyond,) = (
        n
        for measure, _, n, _ in steps
        if (measure, n > max(SIZES)) == ("memory", True) and n < 10**5
    )
    assert 4 * beyond**2 >= Settings().bytes_limit


def test_a_quick_run_is_small_and_whole():
    steps = planned(Settings(quick=True))
    assert {loss for measure, loss, *_ in steps if measure == "time"} == set(CASES)
    assert {n for _, _, n, _ in steps} == {64, 512, 2048}


def test_settings_refuse_what_there_is_not():
    with pytest.raises(ValueError, match=r"loss: wanted one of info_nce, .*, got 'nce'"):
        Settings(losses=("nce",))
    with pytest.raises(ValueError, match="baseline: wanted one of"):
        Settings(baselines=("open-clip",))
    for name in ("seconds", "limit", "memory_limit"):
        for wrong in (math.nan, math.inf, -1.0):
            with pytest.raises(ValueError, match=f"^{name}: wanted a number from 0 .* got {wrong}"):
                Settings(**{name: wrong})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU is visible"):
            Settings(device="cuda")
