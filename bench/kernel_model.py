"""Estimates the time of each Triton kernel from its machine code. Nothing is measured.

    python -m bench.kernel_model [--architecture sm_90]

compiles the kernels of fastsim, siglip-kernel and memeff that compute a loss and its gradient. It
needs no GPU. It counts the instructions of a tile in the machine code by the unit that executes
them, and predicts the time of a step. bench/results/kernel_model.txt holds its output.

Assumptions:

* Outside the loops of the product each instruction is executed once, on both sides of every branch.
  This is an upper bound. A loop of the product runs once for each step of the depth.
* A multiprocessor issues four warp instructions in a clock. Each unit has the throughput in the
  CUDA programming guide (arithmetic instructions), the tensor cores that in the data sheet.
* The busiest unit determines the time. With two or more resident blocks, one multiplies while
  another is in its epilogue, so the longer of product and epilogue counts; otherwise their sum.
* All products, those of the library too, attain the share ATTAINED of the peak.
* Memory is read and written at the bandwidth of the data sheet. Caches hold the operands.
"""

import contextlib
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import click
import torch

from bench.compile_report import blocks_of, operand, recording, resources
from fastsim.backends.triton.backend import TritonBackend
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss

ROWS = COLUMNS = 65536
DEPTH = 768
ATTAINED = 0.8
SCORES = ROWS * COLUMNS


class Gpu(NamedTuple):
    """A GPU by its data sheet and the CUDA programming guide.

    clock: Hz. tensor: FLOP/s of float16 products with float32 sums. bandwidth: bytes per second.
    fma: float32 multiply-adds of a multiprocessor in a clock.
    """

    architecture: str
    name: str
    multiprocessors: int
    clock: float
    tensor: float
    bandwidth: float
    fma: int


GPUS = {
    "sm_80": Gpu("sm_80", "A100 SXM", 108, 1.41e9, 312e12, 2.04e12, 64),
    "sm_89": Gpu("sm_89", "L40S", 142, 2.52e9, 362e12, 0.864e12, 128),
    "sm_90": Gpu("sm_90", "H100 SXM", 132, 1.83e9, 989e12, 3.35e12, 128),
}

UNITS = {
    "tensor": r"HGMMA|HMMA|UTCHMMA",
    "special": r"MUFU",
    "fma": r"F(ADD|MUL|FMA)|IMAD|HADD2|HFMA2|HMUL2",
    "memory": r"(LD|ST|RED|ATOM|UTMA|UBLKCP|SYNCS|CCTL)\w*|SHFL",
    "control": r"BRA|BSSY|BSYNC|BAR|NOP|EXIT|CALL|RET|WARP\w*|ELECT|DEPBAR|R2UR|U\w+|MEMBAR|ERRBAR",
}
UNIT = re.compile("|".join(f"(?P<{unit}>^(?:{names})$)" for unit, names in UNITS.items()))
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*?);", re.M)


# ---- machine code ----


def unit_of(name):
    """The unit of UNITS that executes an instruction, or "alu" (integers, comparisons)."""
    match = UNIT.match(name)
    return match.lastgroup if match else "alu"


def instructions(cubin):
    """[(address, name, operands)] of the only kernel in a cubin."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "-sass", path]
        text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return instructions_of(text)


def instructions_of(text):
    """[(address, name, operands)] from the output of cuobjdump."""
    return [(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(text)]


def product_loops(code):
    """[(first, last)] addresses of the loops that multiply matrices.

    Waits behind the end of the code jump back into it. The span of such a jump is no loop, and is
    longer than the loop into which it jumps.
    """
    spans = []
    for address, name, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
        if target and int(target[1], 16) < address:
            first = int(target[1], 16)
            if any(unit_of(n) == "tensor" and first <= a <= address for a, n, _ in code):
                spans.append((first, address))
    loops = []
    for first, last in sorted(spans, key=lambda span: span[1] - span[0]):
        if all(last < begin or end < first for begin, end in loops):
            loops.append((first, last))
    return loops


def counts(code, steps):
    """{unit: instructions that a warp executes for a tile}.

    steps: how often each loop of the product runs.
    """
    loops, result = product_loops(code), dict.fromkeys([*UNITS, "alu"], 0)
    for address, name, _ in code:
        in_loop = any(first <= address <= last for first, last in loops)
        result[unit_of(name)] += steps if in_loop else 1
    return result


# ---- time ----


class Kernel(NamedTuple):
    """One kernel of a loss.

    tile: (rows, columns) that a program works on. step: of the depth. products: over the depth, for
    each score. bytes: written and read for each score.
    """

    name: str
    compiled: object
    tile: tuple
    step: int
    products: int
    bytes: float


class Estimate(NamedTuple):
    """The estimate for a kernel.

    per_score: {unit: instructions of a thread for each score}. product, epilogue: clocks of a tile.
    ms: milliseconds of all tiles.
    """

    registers: int
    blocks: int
    per_score: dict
    product: float
    epilogue: float
    ms: float


def estimate(kernel, gpu):
    """The `Estimate` of a kernel on a GPU."""
    registers, _, _, _ = resources(kernel.compiled)
    warps = kernel.compiled.metadata.num_warps
    blocks = max(1, blocks_of(gpu.architecture, registers, kernel.compiled))
    area = kernel.tile[0] * kernel.tile[1]
    code = instructions(kernel.compiled.asm["cubin"])
    instruction_counts = counts(code, DEPTH // kernel.step)
    tensor = gpu.tensor * ATTAINED / (gpu.multiprocessors * gpu.clock)
    product = 2 * area * DEPTH * kernel.products / tensor
    clocks = {
        "issue": sum(instruction_counts.values()) / 4,
        "special": instruction_counts["special"] * 32 / 16,
        "fma": instruction_counts["fma"] * 32 / gpu.fma,
        "alu": instruction_counts["alu"] * 32 / 64,
        "memory": instruction_counts["memory"] * 32 / 32,
    }
    epilogue = warps * max(clocks.values())
    tile_clocks = max(product, epilogue) if blocks > 1 else product + epilogue
    seconds = SCORES / area * tile_clocks / (gpu.multiprocessors * gpu.clock)
    seconds = max(seconds, SCORES * kernel.bytes / gpu.bandwidth)
    share = 32 * warps / area
    per_score = {unit: number * share for unit, number in instruction_counts.items()}
    return Estimate(registers, blocks, per_score, product, epilogue, 1e3 * seconds)


def library_ms(products, gpu):
    """Milliseconds of the library's products of score gradients and rows."""
    return 1e3 * products * 2 * SCORES * DEPTH / (gpu.tensor * ATTAINED)


# ---- the kernels ----


def launched(architecture, call):
    """(name, constants, compiled) of the tile kernels that `call(backend, x, y)` launches."""
    with recording(architecture) as launches, operand("float16") as dtype:
        backend = TritonBackend()
        x, y = (torch.randn(n, DEPTH, dtype=dtype) for n in (256, 512))
        call(backend, backend.tile_rows(x)[0], backend.tile_rows(y)[0])
    return [
        (kernel.fn.__name__, constants, compiled)
        for kernel, constants, compiled in launches
        if kernel.fn.__name__ in ("tile_kernel", "kept_score_grads_kernel")
    ]


BLOCK = slice(0, 256), slice(0, 512)


def _fused(tile):
    def call(backend, x, y):
        workspace = backend.workspace(x, y, whole_rows=True)
        backend.fused_pass(tile, x, y, BLOCK, torch.ones(256), workspace)

    return call


def _two_passes(tile):
    def call(backend, x, y):
        state = backend.forward(tile, x, y)
        coefficients = tile.coefficients(state, torch.ones(256, dtype=torch.float64))
        backend.score_grad(tile, x, y, BLOCK, coefficients, backend.workspace(x, y))

    return call


def ours(architecture):
    """Yields ("fastsim", loss, kernels of a step, number of library products)."""
    scale, bias = torch.tensor([20.0, -10.0])
    groups = Pairs(row_groups=torch.arange(256), column_groups=torch.arange(512))
    positives = Pairs(torch.arange(256))
    steps = {
        "siglip": (_fused(TileLoss("sigmoid", groups, scale, bias)), 2),
        "info_nce": (_fused(TileLoss("softmax", positives, scale)), 2),
        "info_nce symmetric": (
            _two_passes(TileLoss("softmax", positives, scale, symmetric=True)),
            2,
        ),
        "closest negative": (lambda backend, x, y: backend.closest(positives, False, x, y), 0),
    }
    for loss, (call, products) in steps.items():
        kernels = []
        for name, constants, compiled in launched(architecture, call):
            epilogue = constants["EPILOGUE"].fn.__name__
            if name == "tile_kernel":
                sizes = constants["SIZES"]
                partials = 4 * constants["ROWS_OUT"] / constants["WIDTH"]
                partials += 4 * constants["COLUMNS_OUT"] / sizes.rows
                # Only the second of two passes writes a panel.
                one_pass = products and loss != "info_nce symmetric"
                moved_bytes = 2 * partials + 2.0 * bool(one_pass or "score_grad" in epilogue)
                tile = sizes.rows, sizes.columns
                kernels.append(Kernel(epilogue, compiled, tile, sizes.depth, 1, moved_bytes))
            else:
                tile = constants["ROWS"], constants["WIDTH"]
                kernels.append(Kernel(f"kept, {epilogue}", compiled, tile, DEPTH, 0, 2 * 2.0))
        yield "fastsim", loss, kernels, products


@contextlib.contextmanager
def _capability(architecture):
    """A context with the compute capability that both packages read when they are imported."""
    previous = torch.cuda.get_device_capability
    number = int(architecture[3:])
    torch.cuda.get_device_capability = lambda device=None: divmod(number, 10)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = previous


def siglip_kernel(architecture):
    """As `ours`, for siglip-kernel: its product with the loss as the epilogue.

    The fastest of the four block sizes that the package tries counts.
    """
    with _capability(architecture), recording(architecture):
        from siglip_kernel import fused_chunked_epilogue as package

        x = torch.zeros(1024, DEPTH, dtype=torch.bfloat16)
        panel, sums = torch.zeros(1024, 1024, dtype=torch.bfloat16), torch.zeros(64)
        arguments = x, x, panel, sums, sums, sums, 1024, 1024, DEPTH, 0, 10.0, -10.0
        tuned, best = package._gemm_bce_kernel, None
        tuned.fn.device_caches.clear()  # of another architecture
        for config in tuned.configs[:4]:
            sizes = config.kwargs
            compiled = tuned.fn.warmup(
                *arguments,
                **sizes,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                enable_fp_fusion=True,
                grid=(1,),
            )
            tile = sizes["BLOCK_M"], sizes["BLOCK_N"]
            name = f"gemm_bce {tile[0]} x {tile[1]}"
            kernel = Kernel(name, compiled, tile, sizes["BLOCK_K"], 1, 2.0)
            ms = estimate(kernel, GPUS[architecture]).ms
            best = min(best or (ms, kernel), (ms, kernel), key=lambda pair: pair[0])
    yield "siglip-kernel", "siglip", [best[1]], 2


def memeff(architecture):
    """As `ours`, for the CLIP loss of memeff.

    One pass computes the denominators, a second adds both gradients atomically.
    """
    with _capability(architecture), recording(architecture):
        from memeff import _common
        from memeff import distributed_clip_loss as package

        x = torch.zeros(1024, DEPTH, dtype=torch.bfloat16)
        sums, out = torch.zeros(1024), torch.zeros(1024, DEPTH)
        blocks = {"BLOCK_SIZE_D": 64, "D_MODEL": DEPTH, "INPUT_PRECISION": "tf32", "grid": (1,)}
        blocks["enable_fp_fusion"] = True
        for kernel in (package.clip_denom_kernel, package.clip_grad_both_kernel):
            kernel.device_caches.clear()  # of another architecture
        first = package.clip_denom_kernel.warmup(
            x, x, sums, sums, 1024, 1024, 20.0, BLOCK_SIZE_I=128, BLOCK_SIZE_J=128, **blocks
        )
        rows, columns, warps, stages = _common.backward_blocks(None)
        second = package.clip_grad_both_kernel.warmup(
            *(x, x, sums, sums, out, out, 20.0, 20.0, 1024, 1024),
            BLOCK_SIZE_I=rows,
            BLOCK_SIZE_J=columns,
            num_warps=warps,
            num_stages=stages,
            **blocks,
        )
    # Bytes of the float32 sums that every tile reads and writes atomically.
    atomic_bytes = 8 * DEPTH * (1 / rows + 1 / columns)
    kernels = [
        Kernel("clip_denom", first, (128, 128), 64, 1, 0.0),
        # TF32 has half the rate of float16, so both gradient products count twice.
        Kernel("clip_grad_both", second, (rows, columns), 64, 5, atomic_bytes),
    ]
    yield "memeff", "info_nce symmetric", kernels, 0


HEAD = ("package", "loss", "kernel", "arch", "regs", "blocks", "fma", "alu", "special", "memory")
HEAD += ("product", "epilogue", "ms")
LAYOUT = "{:<14} {:<19} {:<26} {:<6} {:>4} {:>6} {:>6} {:>6} {:>7} {:>6} {:>8} {:>8} {:>7}"


def lines(architecture):
    """The table of one architecture."""
    gpu = GPUS[architecture]
    for package, loss, kernels, products in itertools.chain(
        *(steps_of(architecture) for steps_of in (ours, siglip_kernel, memeff))
    ):
        total = library_ms(products, gpu)
        for kernel in kernels:
            result = estimate(kernel, gpu)
            total += result.ms
            units = (f"{result.per_score[u]:.1f}" for u in ("fma", "alu", "special", "memory"))
            clocks = f"{result.product:.0f}", f"{result.epilogue:.0f}"
            row = package, loss, kernel.name, architecture, result.registers, result.blocks
            yield LAYOUT.format(*row, *units, *clocks, f"{result.ms:.1f}")
        name = f"with {products} library products" if products else "a step"
        blanks = ("",) * (len(HEAD) - 5)
        yield LAYOUT.format(package, loss, name, architecture, *blanks, f"{total:.1f}")


@click.command()
@click.option("--architecture", "architectures", multiple=True, default=tuple(GPUS))
def main(architectures):
    """Print estimated times of losses and their gradients."""
    import triton

    click.echo(
        f"# An estimate from machine code (Triton {triton.__version__}), no measurement:"
        f" {ROWS} x {COLUMNS} x {DEPTH}, 16-bit inputs,\n# loss and gradient. Instructions of a"
        " thread for a score by unit, clocks of a tile's product and epilogue."
    )
    for architecture in architectures:
        gpu = GPUS[architecture]
        click.echo(f"# {architecture}: {gpu.name}")
        click.echo(LAYOUT.format(*HEAD))
        for line in lines(architecture):
            click.echo(line)


if __name__ == "__main__":
    main()
