"""What a step with a very large batch takes, estimated without training anything.

It is the memory of each part on one process, and the least time of its work: multiply-adds divided
by a rate that is stated or measured here, bytes divided by a stated bandwidth. A GPU's time is
never at a CPU's rate: without one of a GPU there is none.
"""

import time
from dataclasses import dataclass

import torch

from fastsim.backends.cpu import sizes
from fastsim.backends.torch import panels
from fastsim.cli.products import PRODUCTS
from fastsim.training.counted import counted

GATHER, RING = "gather", "ring"
FLOAT = 4  # bytes in which weights, states and gradients of unit rows are kept


@dataclass(frozen=True)
class Plan:
    """A training step.

    batch_size: rows over all ranks. dim: width of the embeddings. ranks: number of processes.
    micro_batch_size: texts encoded at once. columns: text columns; the first has the anchors, the
    others have candidates. bytes_each: bytes of one number of an embedding. loss: its name in
    `PRODUCTS`. exchange: "gather" or "ring". gpu: with the panels of the torch backend on a GPU.
    parameters: of the encoder; 0 leaves it out. looked_up: how many of these are never multiplied
    (word embeddings). layers, hidden, heads: of the encoder. tokens: of each text. sharding: of the
    encoder over the ranks, "none", "zero1", "zero2", "zero3" (DeepSpeed) or "fsdp" (FSDP2).
    """

    batch_size: int
    dim: int
    ranks: int = 1
    micro_batch_size: int = 64
    columns: int = 2
    bytes_each: int = 4
    loss: str = "info_nce"
    exchange: str = GATHER
    gpu: bool = False
    parameters: int = 0
    looked_up: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    tokens: int = 128
    sharding: str = "none"

    @property
    def rows(self):
        """Anchors of the largest rank."""
        return -(-self.batch_size // self.ranks)

    @property
    def candidates(self):
        """Candidates of all ranks."""
        return self.batch_size * (self.columns - 1)

    @property
    def alive_candidates(self):
        """Candidates that a rank holds: all, or a few ranks' on their way around the ring."""
        if self.exchange == RING and self.ranks > 1:
            return min(self.ranks, 3) * self.rows * (self.columns - 1)
        return self.candidates


def memory(plan):
    """[(part, bytes on one rank, how they come about)]."""
    operand = 2 if plan.gpu and plan.bytes_each == 2 else 4
    own = plan.rows * plan.columns * plan.dim
    parts = []
    if plan.parameters:
        parts += _encoder(plan)
        # Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
        # equation 1, in bytes for 16-bit activations.
        per_token = plan.hidden * (34 + 5 * plan.heads * plan.tokens / plan.hidden)
        graph = plan.micro_batch_size * plan.tokens * plan.layers * per_token
        texts, tokens = counted(plan.micro_batch_size, "text"), counted(plan.tokens, "token")
        how = f"activations of {texts} of {tokens}, for the backward pass"
        parts.append(("micro-batch", int(graph * plan.bytes_each / 2), how))
    parts.append(("embeddings", 2 * own * plan.bytes_each, "of its own rows, and their gradients"))
    if plan.ranks > 1:
        each = plan.alive_candidates * plan.dim
        how = "of all processes, and their gradients"
        if plan.exchange == RING:
            how = f"of {min(plan.ranks, 3)} processes, on their way around, and their gradients"
        parts.append((f"candidates ({plan.exchange})", 2 * each * plan.bytes_each, how))
    units = (plan.rows + plan.alive_candidates) * plan.dim * operand
    sums = plan.alive_candidates * plan.dim * FLOAT
    parts.append(("unit rows", units + sums, "of anchors and candidates, and a gradient"))
    if plan.gpu:
        # Scores and one matrix beside them in float32, score gradients in the operands' type.
        scores = min(panels.LARGEST_PANEL // FLOAT, plan.rows * plan.alive_candidates)
        how = "scores and score gradients, of the torch backend"
        parts.append(("panel", (2 * FLOAT + operand) * scores, how))
    else:
        columns = plan.alive_candidates
        kept = sizes.KEPT if PRODUCTS[plan.loss][0] == 4 and plan.ranks == 1 else 0
        panel = min(plan.rows * columns, max(sizes.PANEL, kept, sizes.FEWEST_ROWS * columns))
        size = FLOAT * (panel + columns * plan.dim)
        parts.append(("panel", size, "scores; the candidates once more, packed"))
    return parts


def _encoder(plan):
    """The encoder's parameters, what is learnt of them, and what the ranks share of it.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", section 3. In FSDP2 `GradCache` reduces once a step, so that weights stay gathered and
    gradients whole from the first micro-batch's backward pass to the last one's.
    """
    each, share = FLOAT * plan.parameters, 1 / plan.ranks
    if plan.sharding == "none" or plan.ranks == 1:
        return [("encoder", 4 * each, "weights, gradients, two states of AdamW")]
    if plan.sharding == "fsdp":
        return [
            ("encoder", int(3 * share * each), "its share of weights and two states of AdamW"),
            ("gathered", 2 * each, "weights and gradients, whole until the last micro-batch"),
        ]
    if plan.sharding == "zero3":
        how = "its share of weights, gradients and states of AdamW; layers are gathered one by one"
        return [("encoder", int(4 * share * each), how)]
    whole, how = (1, "weights") if plan.sharding == "zero2" else (2, "weights, gradients")
    rest = "of gradients and two states of AdamW" if whole == 1 else "of two states of AdamW"
    return [("encoder", int((whole + (4 - whole) * share) * each), f"{how}, its share {rest}")]


def dense(plan):
    """Bytes of the N x M matrices on one rank that a dense loss holds at least: three of them."""
    return 3 * 4 * plan.rows * plan.candidates


def times(plan, rate, bandwidth=None):
    """[(stage, seconds at least, how)] for `rate` FLOP and `bandwidth` bytes a second and rank."""
    found = []
    if plan.parameters:
        texts = plan.rows * plan.columns
        once = 2 * (plan.parameters - plan.looked_up) * plan.tokens * texts / rate
        found.append(("encode", once, "every text, forward pass"))
        found.append(("encode again", 3 * once, "every text, forward and backward pass"))
    passes = PRODUCTS[plan.loss][plan.exchange == RING and plan.ranks > 1]
    products = passes * 2 * plan.rows * plan.candidates * plan.dim
    found.append(("loss", products / rate, f"{passes} products of {plan.rows:,} x "
                  f"{plan.candidates:,} x {plan.dim:,}"))  # fmt: skip
    if bandwidth and plan.ranks > 1:
        sent = sum(size for _, size in rounds(plan))
        how = f"{_size(sent)} to and from each process"
        seconds = sent / bandwidth
        if plan.exchange == RING:
            hidden = sum(min(work / rate, size / bandwidth) for work, size in rounds(plan))
            seconds -= hidden
            how += f"; {hidden:.3g} s more are hidden behind the products"
        found.append(("exchange", seconds, how))
    return found


def rounds(plan):
    """[(operations, bytes to and from a rank)] of the loss: forward and backward.

    Gathered, embeddings come and their gradients go, in float32; on the ring embeddings come again
    on the way back.
    """
    around = plan.exchange == RING and plan.ranks > 1
    passes = PRODUCTS[plan.loss][around]
    product = 2 * plan.rows * plan.candidates * plan.dim
    others = plan.candidates * (plan.ranks - 1) // plan.ranks * plan.dim
    back = FLOAT + (plan.bytes_each if around else 0)
    return [(product, others * plan.bytes_each), ((passes - 1) * product, others * back)]


# Bytes of device memory that a score costs beside the products, forward and backward of a loss
# over rows, each read or write of 4 bytes in float32 and 2 in float16. Counted, not measured.
# torch: the product writes the panel; maximum and sum read it; subtract, scale, exponential and
# weight read and write it; it becomes float16, which two products read.
# compiled, as where Triton is installed: all between the product and the float16 reads it three
# times, for maximum, sum and score gradients.
# kernels: the product's epilogue writes float16 score gradients, which two products read.
PANEL_BYTES = {
    "torch": 4 + 2 * 4 + 4 * 8 + 6 + 2 * 2,
    "torch, compiled": 4 + 3 * 4 + 2 + 2 * 2,
    "triton, cuda": 2 + 2 * 2,
}


def estimates(plan, rate, memory_rate):
    """[(backend, seconds of a loss over rows, how)] on paper, nothing of it measured.

    memory_rate: bytes a second of the device's memory. Products and the passes between them take
    turns in torch; in a kernel the epilogue hides under the product.
    """
    products = next(seconds for stage, seconds, _ in times(plan, rate) if stage == "loss")
    scores = plan.rows * plan.candidates
    found = []
    for name, each in PANEL_BYTES.items():
        panels_ = scores * each / memory_rate
        how = f"products {products:.3g} s, {each} bytes a score {panels_:.3g} s"
        found.append((name, products + panels_, how))
    return found


def rate_here(plan):
    """FLOP a second of the device that is planned for; None for a GPU where there is none."""
    if plan.gpu and not torch.cuda.is_available():
        return None
    half = plan.gpu and plan.bytes_each == 2
    return measured_rate("cuda" if plan.gpu else "cpu", torch.bfloat16 if half else torch.float32)


def measured_rate(device, dtype=torch.float32, seconds=0.3):
    """FLOP a second of a product on this device, as large as a panel's."""
    x = torch.randn(1024, 768, device=device, dtype=dtype)
    y = torch.randn(768, 4096, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    at_once = 100 if device == "cuda" else 1  # waiting takes as long as a product
    x @ y
    wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(at_once):
            x @ y
        wait()
        count += at_once
    return 2 * x.shape[0] * x.shape[1] * y.shape[1] * count / (time.perf_counter() - start)


def encoder_shape(name):
    """The encoder's part of a `Plan` from a model's folder or name, and the width `dim` it gives.

    No weights are loaded, but for those of a head.
    """
    import transformers

    from fastsim.encoders.model_files import (
        adapted,
        auto_class,
        loading,
        model_folder,
        read_parts,
    )
    from fastsim.encoders.parts import width_after

    folder = model_folder(name)
    parts = {"transformer": folder, "head": []}
    if (folder / "modules.json").is_file():
        parts = read_parts(folder, wanted=("transformer",))
    base, _ = adapted(parts["transformer"])
    with loading(folder):
        config = transformers.AutoConfig.from_pretrained(base)
        with torch.device("meta"):
            model = auto_class("AutoModel", config).from_config(config)
        return {
            "dim": width_after(parts["head"], config.hidden_size),
            "parameters": sum(p.numel() for p in model.parameters()),
            "looked_up": model.get_input_embeddings().weight.numel(),
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
        }


def report(plan, rate, bandwidth=None, memory_rate=None):
    """The plan as text; with a rate of None its memory alone."""
    lines = [
        f"batch of {counted(plan.batch_size, 'row')}, {counted(plan.candidates, 'candidate')} of"
        f" width {plan.dim:,}, {counted(plan.ranks, 'process', 'processes')}; for each process:",
        "",
    ]
    parts = memory(plan)
    parts.append(("together", sum(size for _, size, _ in parts), ""))
    lines += [f"  {part:<20}{_size(size):>12}  {how}" for part, size, how in parts]
    lines += [f"  {'(dense scores':<20}{_size(dense(plan)):>12}  that a dense loss would add)", ""]
    if rate is None:
        lines.append(
            "  no time: there is no GPU here to measure; give the TFLOP/s of one as --rate"
        )
    else:
        stages = times(plan, rate, bandwidth)
        stages.append(("together", sum(seconds for _, seconds, _ in stages), ""))
        lines += [f"  {stage:<20}{seconds:>10.3g} s  {how}" for stage, seconds, how in stages]
        lines.append(f"  at {rate / 1e12:.3g} TFLOP/s, arithmetic alone: a lower bound")
    if plan.gpu:
        lines.append(
            "  the memory is that of the torch backend, which a GPU takes by default: Triton and"
            " CUDA kernels run where `fastsim verify` has found them right and faster"
        )
    if memory_rate and rate is not None:
        lines += ["", "  the loss by backend, an estimate on paper: no device has measured it"]
        for backend, seconds, how in estimates(plan, rate, memory_rate):
            lines.append(f"  {backend:<20}{seconds:>10.3g} s  {how}")
    return "\n".join(line.rstrip() for line in lines)


def _size(count):
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"
