"""The run of one process: every measurement, small sizes first."""

import random
from dataclasses import asdict
from math import inf
from typing import NamedTuple

from fastsim.benchmark import ceilings
from fastsim.benchmark.accuracy import errors
from fastsim.benchmark.calls import reason, runnable
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.memory import limited, rise
from fastsim.benchmark.progress import with_progress
from fastsim.benchmark.results import environment
from fastsim.benchmark.settings import SLOW_BASELINES
from fastsim.benchmark.timing import in_turns, summary

# The largest N at which the forward pass alone is timed; beyond, all time goes to both passes.
FORWARD_UP_TO = 2048
LONG = 1.0  # expected seconds of a call from which on a warm-up makes no difference
TEMPERATURES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


class Step(NamedTuple):
    """A measurement: its share of the run's time, its text for the progress, its call, (N, D)."""

    weight: int
    text: str
    function: object
    arguments: tuple
    size: tuple[float, float]


def run(settings, *, progress=True):
    """(environment, rows) of all that the settings ask for, measured in this process.

    The losses of a size are measured in random order; the rows have the order of the cases.
    """
    about = environment(settings.device, asdict(settings))
    steps = Session(settings).steps()
    order = sorted(range(len(steps)), key=lambda k: (steps[k].size, random.random()))
    ordered = with_progress([steps[k] for k in order], visible=progress)
    rows = {k: step.function(*step.arguments) for k, step in zip(order, ordered, strict=True)}
    return about, [row for k in range(len(steps)) for row in rows[k]]


class Session:
    """The measurements of a run, and what it knows so far: times of calls, and which calls fail."""

    def __init__(self, settings):
        self.settings = settings
        self.device = settings.device
        self.dtype = settings.dtype_name
        self.latest_times = {}  # (loss, baseline, width) -> (N, seconds of both passes)
        self.failures = {}  # (loss, baseline) -> (N, reason) of the smallest N that failed
        self.unavailable = set()  # (loss, baseline) that fail at every N

    def steps(self):
        """Every `Step` of the run, small sizes first."""
        settings, steps = self.settings, []
        if "time" in settings.measures:
            steps.append(Step(1, "ceilings", self.machine, (), (0, 0)))
        sizes = {
            (rows, width)
            for case in settings.cases
            for rows in (*settings.sizes_of(case), *settings.memory_sizes_of(case))
            for width in settings.dims_of(case)
        }
        for size in sorted(sizes):
            steps += self._steps_of(size)
        if "error" in settings.measures:
            for case in settings.cases:
                for options in self._error_options(case):
                    text = f"error of {case.name}"
                    steps.append(Step(1, text, self.error, (case, options), (inf, inf)))
        return steps

    def _steps_of(self, size):
        (rows, width), settings = size, self.settings
        weight, place = 1 + rows * rows * width // 2**33, f"{rows:,} x {width}"
        cases = [case for case in settings.cases if width in settings.dims_of(case)]
        if "memory" in settings.measures:
            for case in cases:
                if rows in settings.memory_sizes_of(case) and self._is_first_width(case, width):
                    text = f"memory of {case.name}, {place}"
                    yield Step(weight, text, self.memory, (case, *size), size)
        cases = [case for case in cases if rows in settings.sizes_of(case)]
        if "time" in settings.measures:
            if any(case.products[1] for case in cases):
                yield Step(1 + weight // 4, f"products, {place}", self.products, size, size)
            for case in cases:
                yield Step(weight, f"{case.name}, {place}", self.time, (case, *size), size)

    def _is_first_width(self, case, width):
        return width == self.settings.dims_of(case)[0]

    def _error_options(self, case):
        is_swept = case.function is CASES["info_nce"].function and not self.settings.quick
        return [{}, *({"temperature": t} for t in TEMPERATURES if is_swept)]

    # ---- the measurements: each returns rows ----

    def machine(self):
        seconds = 0.3 if self.settings.quick else 1.0
        rows = ceilings.machine_rows(device=self.device, seconds=seconds)
        for case in self.settings.cases:
            contestants = self.settings.contestants(case)
            serving = [baseline for baseline in contestants if self._serves(baseline, case)]
            rows += ceilings.call_rows(case.name, serving, self.settings.problem_options)
        return [{"measure": "ceiling", **row} for row in rows]

    def _serves(self, baseline, case):
        """Whether a baseline is installed and computes this loss on this device in this dtype."""
        if self.settings.why_left_out(baseline, 2):
            return False
        problem = case.problem(2, 2, **self.settings.problem_options)
        try:
            baseline.call(problem)
        except Exception:
            return False
        return True

    def products(self, rows, width):
        seconds = self.settings.pass_seconds / 3
        common = {"device": self.device, "dtype": self.settings.operands}
        return [
            {"measure": "ceiling"} | ceilings.product_rows(rows, width, seconds=seconds, **common)
        ]

    def time(self, case, rows, width, names=None):
        """Rows of both passes. names: of the contestants that take turns, by default all."""
        problem = self._problem(case, rows, width)
        calls, result = {}, []
        for baseline in self.settings.contestants(case):
            if names is not None and baseline.name not in names:
                continue
            if (case.name, baseline.name) in self.unavailable:
                continue
            why = self._why_left_out(case, baseline, rows)
            why = why or self._why_too_long(case, baseline, rows, width)
            if why is None:
                try:
                    calls[baseline.name] = baseline.call(problem)
                    continue
                except Exception as error:
                    why = reason(error)
                    self.unavailable.add((case.name, baseline.name))
            result.append(self._row("time", case, baseline.name, rows, width, why))
        for which in self.settings.passes:
            if which == "forward" and rows > FORWARD_UP_TO and case.products[0]:
                continue
            functions = {
                name: runnable(call, problem, which)
                for name, call in calls.items()
                if (case.name, name) not in self.failures
            }
            result += self._timed(case, rows, width, which, functions)
        return result

    def _timed(self, case, rows, width, which, functions):
        """Rows of one pass. functions: {name: a function that does the pass}."""
        expected = {
            name: self._expected_seconds(case, name, rows, width) or 0.0 for name in functions
        }
        cold = [name for name, seconds in expected.items() if seconds >= LONG]
        # In random order: each process calls the functions in another order.
        turns = {name: functions[name] for name in random.sample([*functions], len(functions))}
        with limited(self.settings.bytes_limit, self.device):
            times = in_turns(
                turns,
                seconds=self.settings.pass_seconds,
                fewest=1 if cold and self.settings.processes > 1 else 2,
                cold=cold,
            )
        result = []
        for name in functions:
            seconds = times[name]
            if not isinstance(seconds, list):
                self._note_failure(case, name, rows, seconds)
                failure = self._row("time", case, name, rows, width, seconds, **{"pass": which})
                result.append(failure)
                continue
            row = {"pass": which, **summary(seconds)}
            best = min(row["repeats ms"])
            if which == "forward + backward":
                self.latest_times[case.name, name, width] = rows, 1e-3 * best
            if case.products[0]:
                work = case.flop(rows, width, backward=which != "forward")
                row["GFLOP/s"] = float(f"{work / (1e6 * best):.5g}")
            result.append(self._row("time", case, name, rows, width, None, **row))
        return result

    def memory(self, case, rows, width):
        result = []
        for baseline in self.settings.contestants(case):
            if not self._serves(baseline, case):
                continue  # the rows of times have the reason
            why = self._why_left_out(case, baseline, rows)
            if baseline.name == "torch.compile":
                why = "compiling raises the peak of a fresh process more than the loss"
            if why is None:
                value = rise(
                    *(case.name, baseline.name, rows, width),
                    device=self.device,
                    dtype=self.dtype,
                    limit=self.settings.bytes_limit,
                )
                if not isinstance(value, str):
                    row = self._row("memory", case, baseline.name, rows, width, None)
                    result.append(row | {"rise MB": value})
                    continue
                why = value
                self._note_failure(case, baseline.name, rows, why)
            result.append(self._row("memory", case, baseline.name, rows, width, why))
        return result

    def error(self, case, options):
        rows, width = case.error_rows, self.settings.dims_of(case)[0]
        if self.settings.sizes:
            rows = min(rows, max(self.settings.sizes))
        result = []
        for baseline in self.settings.contestants(case):
            if not self._serves(baseline, case) or (options and baseline.name in SLOW_BASELINES):
                continue
            problem = self._problem(case, rows, width, **options)
            try:
                with limited(self.settings.bytes_limit, self.device):
                    values, why = errors(baseline.call(problem), problem), None
            except Exception as error:
                values, why = {}, reason(error)
            row = self._row("error", case, baseline.name, rows, width, why)
            result.append(row | {"options": problem.options} | values)
        return result

    # ---- before a call ----

    def _problem(self, case, rows, width, **options):
        return case.problem(rows, width, **self.settings.problem_options, **options)

    def _expected_seconds(self, case, name, rows, width):
        """Seconds of both passes, from the time at the last size; None if it is unknown.

        The time of a loss over a score matrix grows with the square of N, that of others with N.
        """
        if (case.name, name, width) not in self.latest_times:
            return None
        last_rows, seconds = self.latest_times[case.name, name, width]
        power = 2 if case.products[0] else 1
        return seconds * (rows / last_rows) ** power

    def _why_too_long(self, case, baseline, rows, width):
        seconds = self._expected_seconds(case, baseline.name, rows, width) or 0.0
        if seconds <= self.settings.limit:
            return None
        return f"a call would take {seconds:.0f} s, beyond the limit of {self.settings.limit:g}"

    def _why_left_out(self, case, baseline, rows):
        """Why a baseline is not called at this size: it failed at a smaller one, or by default."""
        smallest, why = self.failures.get((case.name, baseline.name), (rows + 1, None))
        return why if rows >= smallest else self.settings.why_left_out(baseline, rows)

    def _note_failure(self, case, name, rows, why):
        smallest, _ = self.failures.get((case.name, name), (rows, why))
        self.failures[case.name, name] = min(smallest, rows), why

    def _row(self, measure, case, name, rows, width, why, **more):
        row = {
            "measure": measure,
            "loss": case.name,
            "implementation": name,
            "rows": rows,
            "width": width,
            "dtype": self.dtype,
            **more,
        }
        return row if why is None else row | {"not measured": why}
