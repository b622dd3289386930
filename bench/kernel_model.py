"""How long each Triton kernel should take, from its machine code: an estimate, not a measurement.

    python -m bench.kernel_model [--architecture sm_90]

compiles the kernels of fastsim, siglip-kernel and memeff that make a loss and its gradient, with no
GPU present, counts the instructions of a tile in the machine code by the unit that executes them,
and predicts the time of a step. bench/results/kernel_model.txt holds its output.

What is assumed:

* Outside the loops of the product an instruction is executed once, on either side of every
  branch: an upper bound. A loop of the product runs as often as the depth has steps.
* A multiprocessor issues four instructions of a warp a clock. Each unit has the throughput of
  the CUDA programming guide (arithmetic instructions); the tensor cores that of the data sheet.
* The busiest unit decides. Where two blocks or more are resident, one multiplies while another
  is at its epilogue, so that the larger of product and epilogue counts, else their sum.
* Products, ours and the library's, attain the share ATTAINED of the peak.
* Memory: what is written and read, at the bandwidth of the data sheet. Caches hold the operands.
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
    """Of data sheets and the CUDA programming guide.

    tensor: FLOP/s of float16 products with float32 sums; fma: float32 sums a clock and
    multiprocessor.
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
    """The unit that executes an instruction: of UNITS, else "alu" (integers, comparisons)."""
    found = UNIT.match(name)
    return found.lastgroup if found else "alu"


def instructions(cubin):
    """[(address, name, operands)] of the one kernel in it."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "-sass", path]
        text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return instructions_of(text)


def instructions_of(text):
    """[(address, name, operands)] of what cuobjdump prints."""
    return [(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(text)]


def product_loops(code):
    """[(first, last)] addresses of the loops that multiply matrices.

    Waits that stand behind the code jump back into it; what such a jump spans is no loop, and
    longer than the one that it jumps into.
    """
    spans = []
    for at, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < at:
            first = int(target[1], 16)
            if any(unit_of(n) == "tensor" and first <= a <= at for a, n, _ in code):
                spans.append((first, at))
    loops = []
    for first, last in sorted(spans, key=lambda span: span[1] - span[0]):
        if all(last < other or end < first for other, end in loops):
            loops.append((first, last))
    return loops


def counts(code, steps):
    """{unit: instructions that a warp executes for a tile}; `steps` of each product loop."""
    loops, found = product_loops(code), dict.fromkeys([*UNITS, "alu"], 0)
    for at, name, _ in code:
        times = steps if any(first <= at <= last for first, last in loops) else 1
        found[unit_of(name)] += times
    return found


# ---- time ----


class Kernel(NamedTuple):
    """One kernel of a loss; a tile is what a program works on.

    products: how many products of the depth it makes of a score. bytes: written and read a score.
    """

    name: str
    compiled: object
    tile: tuple
    step: int
    products: int
    bytes: float


class Estimate(NamedTuple):
    """per_score: instructions of a thread by unit; clocks of a tile; milliseconds of all tiles."""

    registers: int
    blocks: int
    per_score: dict
    product: float
    epilogue: float
    ms: float


def estimate(kernel, gpu):
    """What a kernel should take on a GPU."""
    registers, _, _, _ = resources(kernel.compiled)
    warps = kernel.compiled.metadata.num_warps
    blocks = max(1, blocks_of(gpu.architecture, registers, kernel.compiled))
    area = kernel.tile[0] * kernel.tile[1]
    code = instructions(kernel.compiled.asm["cubin"])
    found = counts(code, DEPTH // kernel.step)
    tensor = gpu.tensor * ATTAINED / (gpu.multiprocessors * gpu.clock)
    product = 2 * area * DEPTH * kernel.products / tensor
    clocks = {
        "issue": sum(found.values()) / 4,
        "special": found["special"] * 32 / 16,
        "fma": found["fma"] * 32 / gpu.fma,
        "alu": found["alu"] * 32 / 64,
        "memory": found["memory"] * 32 / 32,
    }
    epilogue = warps * max(clocks.values())
    each = max(product, epilogue) if blocks > 1 else product + epilogue
    seconds = SCORES / area * each / (gpu.multiprocessors * gpu.clock)
    seconds = max(seconds, SCORES * kernel.bytes / gpu.bandwidth)
    share = 32 * warps / area
    per_score = {unit: number * share for unit, number in found.items()}
    return Estimate(registers, blocks, per_score, product, epilogue, 1e3 * seconds)


def library_ms(products, gpu):
    """Milliseconds of the library's products of a panel with rows."""
    return 1e3 * products * 2 * SCORES * DEPTH / (gpu.tensor * ATTAINED)


# ---- the kernels ----


def launched(architecture, call):
    """(name, constants, compiled) of the tile kernels that `call(backend, x, y)` launches."""
    with recording(architecture) as found, operand("float16") as dtype:
        backend = TritonBackend()
        x, y = (torch.randn(n, DEPTH, dtype=dtype) for n in (256, 512))
        call(backend, backend.tile_rows(x)[0], backend.tile_rows(y)[0])
    return [
        (kernel.fn.__name__, constants, compiled)
        for kernel, constants, compiled in found
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
    """{loss: (kernels of a step, library products)}."""
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
                # Of two passes the second alone writes a panel.
                once = products and loss != "info_nce symmetric"
                moved = 2 * partials + 2.0 * bool(once or "score_grad" in epilogue)
                tile = sizes.rows, sizes.columns
                kernels.append(Kernel(epilogue, compiled, tile, sizes.depth, 1, moved))
            else:
                tile = constants["ROWS"], constants["WIDTH"]
                kernels.append(Kernel(f"kept, {epilogue}", compiled, tile, DEPTH, 0, 2 * 2.0))
        yield "fastsim", loss, kernels, products


@contextlib.contextmanager
def _capability(architecture):
    """Both packages ask for it when they are imported."""
    kept = torch.cuda.get_device_capability
    number = int(architecture[3:])
    torch.cuda.get_device_capability = lambda device=None: divmod(number, 10)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = kept


def siglip_kernel(architecture):
    """Its product with the loss as an epilogue: the fastest of four block sizes that it tries."""
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
    """CLIP: one pass for the denominators, one for both gradients, added atomically."""
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
    # The sums that are added atomically: float32, read and written, of every tile.
    added = 8 * DEPTH * (1 / rows + 1 / columns)
    kernels = [
        Kernel("clip_denom", first, (128, 128), 64, 1, 0.0),
        # TF32 has half the rate of float16: both of its gradient products count twice.
        Kernel("clip_grad_both", second, (rows, columns), 64, 5, added),
    ]
    yield "memeff", "info_nce symmetric", kernels, 0


HEAD = ("package", "loss", "kernel", "arch", "regs", "blocks", "fma", "alu", "special", "memory")
HEAD += ("product", "epilogue", "ms")
LAYOUT = "{:<14} {:<19} {:<26} {:<6} {:>4} {:>6} {:>6} {:>6} {:>7} {:>6} {:>8} {:>8} {:>7}"


def lines(architecture):
    """The table of one architecture."""
    gpu = GPUS[architecture]
    for package, loss, kernels, products in itertools.chain(
        *(made(architecture) for made in (ours, siglip_kernel, memeff))
    ):
        total = library_ms(products, gpu)
        for kernel in kernels:
            found = estimate(kernel, gpu)
            total += found.ms
            units = (f"{found.per_score[u]:.1f}" for u in ("fma", "alu", "special", "memory"))
            clocks = f"{found.product:.0f}", f"{found.epilogue:.0f}"
            row = package, loss, kernel.name, architecture, found.registers, found.blocks
            yield LAYOUT.format(*row, *units, *clocks, f"{found.ms:.1f}")
        name = f"with {products} library products" if products else "a step"
        blanks = ("",) * (len(HEAD) - 5)
        yield LAYOUT.format(package, loss, name, architecture, *blanks, f"{total:.1f}")


@click.command()
@click.option("--architecture", "architectures", multiple=True, default=tuple(GPUS))
def main(architectures):
    """Estimated times of a loss and its gradient."""
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
