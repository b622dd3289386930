"""The settings of a run: the options of `fastsim bench`, checked."""

from dataclasses import dataclass

import torch

from fastsim.backends import backends, pick
from fastsim.benchmark.baselines import BASELINES, ours
from fastsim.benchmark.calls import PASSES
from fastsim.benchmark.cases import CASES, LARGEST_COMMON_SIZE, problem_in
from fastsim.benchmark.dtypes import DTYPES
from fastsim.benchmark.memory import GIB, usual_limit

MEASURES = ("time", "memory", "error")
QUICK_SIZES = (64, 512)
# Compiling takes longer than a whole quick run, and is repeated for other options.
SLOW_BASELINES = ("torch.compile",)
MEMORY_FROM = 2048  # with fewer rows a loss takes only a few pages
LARGEST_VALUE = 1e6  # seconds or GB; a larger value must be a typing error
PROCESSES = 6  # of a run of the command, unless it is quick
# The number of processes that also time more than LARGEST_COMMON_SIZE rows, where a call may take
# many seconds.
LARGE_PROCESSES = 4
MEMORY_BEYOND = 65536  # where one N x N matrix exceeds the limit of memory; for InfoNCE alone


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Empty tuples stand for the defaults of each case.

    processes: the number of fresh processes, each of which times everything (the first four alone
        time more than 2,048 rows); 0: this process times everything.
    seconds: for the rounds of one pass at one size in a process.
    limit: a call that is expected to take more seconds, by its time at a smaller size, is skipped.
    memory_limit: GB (of 2^30 bytes) that a call may take; None: 16, or four fifths of the machine's
        memory if that is less.
    largest: the most rows for which a loss over a score matrix is timed; None: any number.
    """

    losses: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    measures: tuple[str, ...] = MEASURES
    passes: tuple[str, ...] = PASSES
    device: str = "cpu"
    dtype: str = ""
    processes: int = 0
    seconds: float = 0.5
    limit: float = 15.0
    memory_limit: float | None = None
    largest: int | None = None
    quick: bool = False

    def __post_init__(self):
        if self.memory_limit is None:
            object.__setattr__(self, "memory_limit", usual_limit())
        checked = (
            ("loss", self.losses, CASES),
            ("backend", self.backends, backends()),
            ("baseline", self.baselines, (*BASELINES, "none")),
            ("measure", self.measures, MEASURES),
            ("device", (self.device,), ("cpu", "cuda")),
        )
        if self.dtype not in ("", *DTYPES):
            raise ValueError(f"dtype: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("seconds", "limit", "memory_limit"):
            if not 0 <= getattr(self, name) <= LARGEST_VALUE:
                got = getattr(self, name)
                raise ValueError(
                    f"{name}: wanted a number from 0 to {LARGEST_VALUE:,.0f}, got {got}"
                )
        for name, values, choices in checked:
            for value in values:
                if value not in choices:
                    raise ValueError(f"{name}: wanted one of {', '.join(choices)}, got {value!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: wanted one of this machine, got 'cuda': no GPU is visible")

    @property
    def cases(self):
        """The cases that are measured."""
        return [CASES[name] for name in self.losses or CASES]

    @property
    def dtype_name(self):
        """The name in `DTYPES`, by default float32 on a CPU and bfloat16 on a GPU."""
        return self.dtype or {"cpu": "float32", "cuda": "bfloat16"}[self.device]

    @property
    def problem_options(self):
        """The options of `Case.problem` for the device and the dtype."""
        return {"device": self.device, **problem_in(self.dtype_name)}

    @property
    def operands(self):
        """The dtype in which a library multiplies the embeddings."""
        return self.problem_options.get("autocast") or self.problem_options["dtype"]

    @property
    def pass_seconds(self):
        """Seconds for the rounds of one pass at one size."""
        return min(self.seconds, 0.2) if self.quick else self.seconds

    @property
    def bytes_limit(self):
        """The most bytes that a call may take."""
        return int(self.memory_limit * GIB)

    def sizes_of(self, case):
        """The sizes N at which a case is timed."""
        sizes = self.sizes or (QUICK_SIZES if self.quick else case.sizes)
        most = self.largest if case.products[0] else None
        return sizes if most is None else tuple(size for size in sizes if size <= most)

    def dims_of(self, case):
        """The widths D of a case; 1 for a list of scores."""
        return (1,) if case.dims == (1,) else self.dims or case.dims[: 1 if self.quick else None]

    def memory_sizes_of(self, case):
        """The sizes N at which the memory of a case is measured."""
        if self.sizes:
            return self.sizes
        if self.quick:  # headline losses alone by default, as each takes a fresh process
            return (MEMORY_FROM,) if self.losses or max(case.sizes) > LARGEST_COMMON_SIZE else ()
        sizes = tuple(size for size in case.sizes if size >= MEMORY_FROM)
        return (*sizes, MEMORY_BEYOND) if case.name == "info_nce" else sizes

    def contestants(self, case):
        """The implementations of a case: fastsim's backends, then the baselines."""
        names = self.backends or self._usual_backends()
        others = [BASELINES[name] for name in self.baselines or BASELINES if name != "none"]
        return [
            *map(ours, names),
            *(baseline for baseline in others if case.name in baseline.losses),
        ]

    def _usual_backends(self):
        """The backends that a run times by default.

        The specification (eager) is left out, as it is a baseline. On a CPU with a faster backend
        torch is left out too, so that "fastsim" in a table is what a user gets.
        """
        cpu_backend = pick(None, torch.empty(1)).name
        left_out = {"eager"}
        if self.device == "cpu" and cpu_backend != "torch":
            left_out.add("torch")
        return [name for name in backends() if name not in left_out]

    def why_left_out(self, baseline, rows):
        """The reason why a baseline is not measured by default at that size, or None."""
        if self.quick and baseline.name in SLOW_BASELINES and not self.baselines:
            return "left out of a quick run"
        if baseline.up_to and rows > baseline.up_to and not (self.baselines or self.sizes):
            return f"left out beyond N = {baseline.up_to:,} to keep the run short"
        return None
