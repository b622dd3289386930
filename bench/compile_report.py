"""The registers, shared memory and spills of each Triton kernel, compiled without a GPU.

    python -m bench.compile_report [--architecture sm_90] [--operand float16]

prints them for every architecture, kernel, epilogue and operand type. Each kernel appears once,
with the first case that launches it. The passes of the backend run on CPU tensors, and compile a
kernel where they would launch it, so block sizes, specialisations and constants are those of a GPU.
"""

import contextlib
import functools
import itertools
import multiprocessing
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import torch

from bench.multiprocessors import resident
from fastsim.backends.triton.backend import TritonBackend
from fastsim.backends.triton.small_batch import MOST_COLUMNS
from fastsim.pairs import Guide, Pairs
from fastsim.tile_loss import TileLoss

# The architectures that take longest to compile come first, so that all processes end together.
ARCHITECTURES = ("sm_90", "sm_80", "gfx942", "sm_86", "sm_89", "sm_100", "sm_120", "gfx1100")
OPERANDS = ("float16", "tf32", "float32")
ROWS, COLUMNS = 200, 300
# Kinds that compute half the tiles for rows compared with themselves, each for two pairs of blocks.
ALONE = ("softmax", "sigmoid", "squared_error")
TABLE_NOTE = """spills in bytes (sm) or vector registers (gfx); operands float16 for 16-bit inputs;
# blocks: resident on a multiprocessor, by registers, shared memory and warps"""


class Compiled(NamedTuple):
    """One kernel of one launch.

    spills: in bytes (NVIDIA) or registers (AMD). blocks: resident on a multiprocessor.
    hash: from Triton, equal for launches of the same kernel.
    """

    kernel: str
    epilogue: str
    case: str
    operand: str
    architecture: str
    registers: int
    shared: int
    spills: int
    warps: int
    blocks: int
    hash: str
    assembly: str


# ---- compiling in place of launching ----


class _Driver:
    """Stands in for the driver of a GPU: Triton only reads its target."""

    def __init__(self, architecture):
        from triton.backends.compiler import GPUTarget

        if architecture.startswith("sm_"):
            self.target = GPUTarget("cuda", int(architecture[3:]), 32)
        else:
            # AMD's architectures for data centres (gfx9) have warps of 64 threads.
            self.target = GPUTarget("hip", architecture, 64 if architecture[3] == "9" else 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def pretending(architecture):
    """A context in which Triton and the backend act as on a machine with such a GPU."""
    from triton.runtime import driver

    from fastsim.backends.triton.kernels import lists, operands, small_batch, table, tile_launches

    modules = lists, operands, small_batch, tile_launches
    asking = [module for module in modules if hasattr(module, "architecture")]
    kernels = [
        kernel
        for module in modules
        for kernel in vars(module).values()
        if hasattr(kernel, "device_caches")
    ]
    real = driver._active  # `active` raises without a GPU
    driver.set_active(_Driver(architecture))
    for module in asking:
        module.architecture = lambda device: architecture
    for kernel in kernels:
        kernel.device_caches.clear()
    try:
        yield
    finally:
        for module in asking:
            module.architecture = table.architecture
        driver.set_active(real)
        for kernel in kernels:
            kernel.device_caches.clear()


@contextlib.contextmanager
def recording(architecture):
    """A context in which kernels are compiled for the architecture instead of launched.

    Yields the list of their launches: (kernel, constants, compiled kernel).
    """
    from fastsim.backends.triton.kernels import launching

    launches = []

    def compile_only(kernel, grid, arguments, constants):
        launches.append((kernel, constants, kernel.warmup(*arguments, grid=grid, **constants)))

    run, launching.run = launching.run, compile_only
    try:
        with pretending(architecture):
            yield launches
    finally:
        launching.run = run


def resources(compiled):
    """(registers, shared bytes, spills, assembly) of a compiled kernel."""
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers, which costs no memory.
        fields = [r"\.vgpr_count:", r"\.agpr_count:", r"\.vgpr_spill_count:"]
        vector, matrix, spilled = (
            sum(map(int, re.findall(field + r"\s+(\d+)", text))) for field in fields
        )
        return max(vector, matrix), shared, spilled, text
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
        usage = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    # Registers spill to the stack, on which these kernels have nothing else.
    spills = int(re.search(r"STACK:(\d+)", usage)[1])
    return registers, shared, spills, compiled.asm["ptx"]


def blocks_of(architecture, registers, compiled):
    """The number of blocks of a compiled kernel that a multiprocessor holds at a time."""
    metadata = compiled.metadata
    columns = getattr(metadata, "tmem_size", None) or 0
    return resident(architecture, registers, metadata.shared, metadata.num_warps, columns)


# ---- the launches ----


def _integers(count, below=9):
    return torch.randint(0, below, (count,))


def tiles():
    """(name, `TileLoss`) of every epilogue with every kind of pairs that it serves."""
    scale, bias = torch.tensor(20.0), torch.tensor(-10.0)
    positives = Pairs(torch.arange(ROWS))
    excluding = Pairs(torch.arange(ROWS), _integers(ROWS), _integers(COLUMNS))
    groups = Pairs(row_groups=_integers(ROWS), column_groups=_integers(COLUMNS))
    dense = Pairs(dense=torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16))
    integers = Pairs(dense=torch.zeros(ROWS, COLUMNS, dtype=torch.int8))
    others = Pairs(
        row_groups=_integers(ROWS),
        column_groups=_integers(COLUMNS),
        negative_target=0.0,
        skip="diagonal",
    )
    once = Pairs(row_groups=_integers(ROWS), column_groups=_integers(COLUMNS), skip="lower")
    levels = torch.tensor([-1.0, 1.0])
    guide = Guide(
        *(torch.zeros(n, 64, dtype=torch.float16) for n in (ROWS, COLUMNS)), torch.zeros(ROWS)
    )
    guided = Pairs(torch.arange(ROWS), guide=guide)
    return [
        ("positives", TileLoss("softmax", positives, scale, bias)),
        ("symmetric", TileLoss("softmax", positives, scale, bias, symmetric=True)),
        ("exclude", TileLoss("softmax", excluding, scale, bias, 0.1, symmetric=True)),
        ("others", TileLoss("softmax", others, scale, bias, normalise=True)),
        ("guided", TileLoss("softmax", guided, scale, bias, symmetric=True)),
        ("dense", TileLoss("softmax", dense, scale, bias)),
        ("decoupled", TileLoss("decoupled", positives, scale, bias)),
        ("multi_positive", TileLoss("multi_positive", others, scale, bias)),
        (
            "multi_similarity",
            TileLoss("multi_similarity", others, scale, bias, base=0.5, positive_scale=2.0),
        ),
        ("sigmoid groups", TileLoss("sigmoid", groups, scale, bias)),
        ("sigmoid dense", TileLoss("sigmoid", dense, scale, bias)),
        ("squared_error groups", TileLoss("squared_error", groups, scale, bias)),
        ("squared_error integers", TileLoss("squared_error", integers, scale, bias)),
        ("levels once", TileLoss("levels", once, scale, bias, levels=levels)),
        ("levels dense", TileLoss("levels", dense, scale, bias, levels=levels)),
    ]


def run_forward(tile, dtype, columns=None, depth=2048):
    """The launches of a forward pass over this many columns; None: of the rows with themselves."""
    backend = TritonBackend()
    unit = backend.tile_rows(torch.randn(ROWS, depth, dtype=dtype))[0]
    others = unit
    if columns:
        others = backend.tile_rows(torch.randn(columns, depth, dtype=dtype))[0]
    backend.forward(tile, unit, others)


def run_tile(tile, dtype, depth=768, rows="tile_rows"):
    """Every launch of a tile loss for inputs of that dtype.

    rows: the name of the backend's method that makes operands of the inputs.
    """
    backend = TritonBackend()
    unit_x = getattr(backend, rows)(torch.randn(ROWS, depth, dtype=dtype))[0]
    unit_y = getattr(backend, rows)(torch.randn(COLUMNS, depth, dtype=dtype))[0]
    block = slice(0, ROWS), slice(0, COLUMNS)
    workspace = backend.workspace(unit_x, unit_y, whole_rows=True)
    state = backend.forward(tile, unit_x, unit_y)
    grad = torch.ones(() if tile.kind == "levels" else ROWS)
    backend.fused_pass(tile, unit_x, unit_y, block, grad, workspace)
    coefficients = tile.coefficients(state, grad.double())
    backend.score_grad(tile, unit_x, unit_y, block, coefficients, workspace)


def run_rest(dtype, depth=768):
    """The launches that no tile loss makes."""
    backend = TritonBackend()
    x, y = torch.randn(ROWS, depth, dtype=dtype), torch.randn(COLUMNS, depth, dtype=dtype)
    unit_x, inverse = backend.unit_rows(x)
    unit_y, _ = backend.unit_rows(y)
    backend.unit_rows(x, torch.float32)
    for written in {dtype, torch.float32}:
        backend.unit_rows_backward(torch.randn(ROWS, depth), x, inverse, torch.ones(()), written)
        backend.tile_rows_backward(torch.randn(ROWS, depth), x, inverse, torch.ones(()), written)
    excluding = Pairs(torch.arange(ROWS), _integers(ROWS), _integers(COLUMNS))
    backend.closest(excluding, True, unit_x, unit_y)
    groups = Pairs(row_groups=_integers(ROWS), column_groups=_integers(COLUMNS))
    backend.hardest(groups, torch.rand(COLUMNS), unit_x, unit_y)
    backend.cosent(torch.randn(ROWS), torch.rand(ROWS), torch.ones(()), True)


def run_small(dtype, depth=768):
    """The launches of a small batch."""
    backend = TritonBackend()
    x, y = torch.randn(ROWS, depth, dtype=dtype), torch.randn(COLUMNS, depth, dtype=dtype)
    excluding = Pairs(torch.arange(ROWS), _integers(ROWS), _integers(COLUMNS), distinct=True)
    groups = Pairs(row_groups=_integers(ROWS), column_groups=_integers(COLUMNS))
    others = Pairs(row_groups=_integers(ROWS), column_groups=_integers(ROWS), negative_target=0.0)
    number, plain = torch.tensor(20.0), Pairs(torch.arange(ROWS))
    for tile, right, scale in (
        (TileLoss("softmax", excluding), y, 20.0),
        (TileLoss("softmax", plain), torch.randn(MOST_COLUMNS, depth, dtype=dtype), 20.0),
        (TileLoss("softmax", excluding, margin=0.1, symmetric=True), y, number),
        (TileLoss("softmax", replace(others, skip="diagonal"), normalise=True), None, 20.0),
        (TileLoss("sigmoid", groups), y, 20.0),
        (TileLoss("hard_triplet", excluding, margin=0.2), y, 1.0),
        (TileLoss("semi-hard_triplet", excluding, margin=0.2), y, 1.0),
    ):
        self_similarity = right is None
        inputs = x, right, scale, -10.0, 0.5
        loss, *saved = backend.in_one_call(tile, *inputs, (True, not self_similarity))
        needs_grad = (True, not self_similarity, False, False)
        backend.one_call_gradients(tile, loss, saved, inputs, needs_grad, dtype)


@contextlib.contextmanager
def operand(name):
    """A context with the float32 precision of these operands; yields the dtype of the inputs."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield torch.bfloat16 if name == "float16" else torch.float32
    finally:
        torch.set_float32_matmul_precision(previous)


def compile_case(architecture, operand_name, case):
    """[Compiled] of the launches of a case, each kernel once."""
    with recording(architecture) as launches, operand(operand_name) as dtype:
        calls()[case](dtype)
    kernels = {}
    for kernel, constants, compiled in launches:
        if compiled.hash in kernels:
            continue
        epilogue = constants["EPILOGUE"].fn.__name__ if "EPILOGUE" in constants else ""
        row = (kernel.fn.__name__, epilogue, case, operand_name, architecture)
        registers, shared, spills, assembly = resources(compiled)
        row += registers, shared, spills, compiled.metadata.num_warps
        blocks = blocks_of(architecture, registers, compiled)
        kernels[compiled.hash] = Compiled(*row, blocks, compiled.hash, assembly)
    return list(kernels.values())


@contextlib.contextmanager
def compiling(cases):
    """A context that yields {(architecture, operand): futures of `compile_case` for its cases}.

    cases: {(architecture, operand): names of cases}. They are compiled on as many cores as torch
    has threads. A kernel of several cases is compiled once, as Triton has a cache.
    """
    pool = ProcessPoolExecutor(torch.get_num_threads(), multiprocessing.get_context("spawn"))
    try:
        yield {
            key: [pool.submit(compile_case, *key, case) for case in names]
            for key, names in cases.items()
        }
    finally:
        pool.shutdown(cancel_futures=True)


@functools.cache
def calls():
    """{case: function of a dtype} of all cases, which together launch every kernel."""
    tile_losses = dict(tiles())
    cases = {name: functools.partial(run_tile, tile) for name, tile in tile_losses.items()}
    square = Pairs(dense=torch.zeros(ROWS, ROWS, dtype=torch.bfloat16))
    for kind in ALONE:
        tile = TileLoss(kind, square, *torch.tensor([20.0, -10.0]))
        cases[f"{kind} alone"] = functools.partial(run_forward, tile)
    cases["positives, dot"] = functools.partial(cases["positives"], rows="dot_rows")
    cases["exclude, 128"] = functools.partial(cases["exclude"], depth=128)
    # Deep enough for every architecture to keep scores.
    for name in ("exclude", "multi_positive"):
        cases[f"{name}, 2048"] = functools.partial(cases[name], depth=2048)
    cases["rows"] = run_rest
    for name in ("positives", "sigmoid groups"):
        tile, sizes = tile_losses[name], {"columns": COLUMNS, "depth": 768}
        cases[f"{tile.kind} forward"] = functools.partial(run_forward, tile, **sizes)
    cases["small batch"] = run_small
    return cases


@click.command()
@click.option("--architecture", "architectures", multiple=True, default=ARCHITECTURES)
@click.option("--operand", "operands", multiple=True, default=OPERANDS)
@click.option("--case", "cases", multiple=True, help="Case to compile. Default: all.")
def main(architectures, operands, cases):
    """Print the table of all kernels."""
    import triton

    click.echo(f"# Triton {triton.__version__}, {TABLE_NOTE}")
    heading = ("kernel", "epilogue", "case", "operand", "arch", "regs", "shared", "spills")
    heading += "warps", "blocks"
    layout = "{:<26} {:<38} {:<22} {:<8} {:<7} {:>4} {:>7} {:>6} {:>5} {:>6}"
    click.echo(layout.format(*heading))
    seen = set()
    keys = list(itertools.product(architectures, operands))
    with compiling(dict.fromkeys(keys, cases or calls())) as futures:
        for future in itertools.chain.from_iterable(futures.values()):
            for row in future.result():
                if row.hash not in seen:
                    seen.add(row.hash)
                    click.echo(layout.format(*row[:-2]))


if __name__ == "__main__":
    main()
