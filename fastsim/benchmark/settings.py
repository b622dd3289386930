"""What a run measures: the options of `fastsim bench`, checked."""

from dataclasses import dataclass

import torch

from fastsim.backends import backends, pick
from fastsim.benchmark.baselines import BASELINES, ours
from fastsim.benchmark.calls import PASSES
from fastsim.benchmark.cases import CASES, UP_TO, problem_in
from fastsim.benchmark.dtypes import DTYPES
from fastsim.benchmark.memory import GIB, usual_limit

MEASURES = ("time", "memory", "error")
QUICK_SIZES = (64, 512)
# Compiling takes longer than all of a quick run, and again for other options.
SLOW = ("torch.compile",)
MEMORY_FROM = 2048  # below, a rise is no more than a few pages
MOST = 1e6  # seconds, or GB: beyond is a slip of the pen
PROCESSES = 6  # of a run of the command, unless it is quick
LARGE_IN = 4  # processes that time more rows than UP_TO, where a call may take many seconds
MEMORY_BEYOND = 65536  # one N x N matrix is more than the limit: tried with InfoNCE alone


@dataclass(frozen=True)
class Settings:
    """Empty tuples stand for what a case has by default.

    processes: fresh ones, each of which times everything (of more than 2,048 rows the first four);
    0: none but this one. seconds: for the rounds of one pass at one size in a process. limit:
    seconds above which a call is not made, as its time at a smaller size foretells. memory_limit:
    GB (2^30 bytes) a call may take; None: 16, or four fifths of the machine's where that is less.
    largest: rows of a score matrix, beyond which none is timed; None: any.
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
        wanted = (
            ("loss", self.losses, CASES),
            ("backend", self.backends, backends()),
            ("baseline", self.baselines, (*BASELINES, "none")),
            ("measure", self.measures, MEASURES),
            ("device", (self.device,), ("cpu", "cuda")),
        )
        if self.dtype not in ("", *DTYPES):
            raise ValueError(f"dtype: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("seconds", "limit", "memory_limit"):
            if not 0 <= getattr(self, name) <= MOST:
                got = getattr(self, name)
                raise ValueError(f"{name}: wanted a number from 0 to {MOST:,.0f}, got {got}")
        for name, values, choices in wanted:
            for value in values:
                if value not in choices:
                    raise ValueError(f"{name}: wanted one of {', '.join(choices)}, got {value!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: wanted one that is here, got 'cuda': no GPU is visible")

    @property
    def cases(self):
        """The cases that are measured."""
        return [CASES[name] for name in self.losses or CASES]

    @property
    def numbers(self):
        """The name in `DTYPES`: float32 on a CPU, bfloat16 on a GPU unless asked for."""
        return self.dtype or {"cpu": "float32", "cuda": "bfloat16"}[self.device]

    @property
    def inputs(self):
        """The options of `Case.problem` on the device, in these numbers."""
        return {"device": self.device, **problem_in(self.numbers)}

    @property
    def operands(self):
        """The dtype in which a library multiplies the embeddings."""
        return self.inputs.get("autocast") or self.inputs["dtype"]

    @property
    def pass_seconds(self):
        """Seconds for the rounds of one pass."""
        return min(self.seconds, 0.2) if self.quick else self.seconds

    @property
    def bytes_limit(self):
        return int(self.memory_limit * GIB)

    def sizes_of(self, case):
        """The N of a case."""
        sizes = self.sizes or (QUICK_SIZES if self.quick else case.sizes)
        most = self.largest if case.products[0] else None
        return sizes if most is None else tuple(size for size in sizes if size <= most)

    def dims_of(self, case):
        """The widths of a case; scores of a list have none."""
        return (1,) if case.dims == (1,) else self.dims or case.dims[: 1 if self.quick else None]

    def memory_sizes_of(self, case):
        """The N at which memory is measured."""
        if self.sizes:
            return self.sizes
        if self.quick:  # a fresh process each: the headlines, unless others are asked for
            return (MEMORY_FROM,) if self.losses or max(case.sizes) > UP_TO else ()
        sizes = tuple(size for size in case.sizes if size >= MEMORY_FROM)
        return (*sizes, MEMORY_BEYOND) if case.name == "info_nce" else sizes

    def contestants(self, case):
        """The baselines of a case, fastsim's backends first."""
        names = self.backends or self._usual_backends()
        others = [BASELINES[name] for name in self.baselines or BASELINES if name != "none"]
        return [
            *map(ours, names),
            *(baseline for baseline in others if case.name in baseline.losses),
        ]

    def _usual_backends(self):
        """The backends that a run times unless told: not the specification, which is a baseline.

        On a CPU plain torch is left out too where `auto` takes another, so that "fastsim" in a
        table is what a user gets.
        """
        cpu_takes = pick(None, torch.empty(1)).name
        beside = {"eager"} if self.device != "cpu" or cpu_takes == "torch" else {"eager", "torch"}
        return [name for name in backends() if name not in beside]

    def left_out(self, baseline, rows):
        """Why a baseline is not measured at that size though it might be, or None."""
        if self.quick and baseline.name in SLOW and not self.baselines:
            return "left out of a quick run"
        if baseline.up_to and rows > baseline.up_to and not (self.baselines or self.sizes):
            return f"left out beyond N = {baseline.up_to:,} to keep the run short"
        return None
