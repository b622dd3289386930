"""Estimates the memory and the minimum time of a training step with a very large batch.

The memory is given by part, for one process. The time is a lower bound: operations divided by a
rate that is given or measured here, and bytes divided by a given bandwidth. The rate of a CPU is
never used for a GPU: without the rate of a GPU no time is estimated.
"""

import time
from dataclasses import dataclass

import torch

from fastsim.backends.cpu import amx_loss, sizes
from fastsim.backends.torch import panels
from fastsim.cli.products import ONE_SET, PRODUCTS
from fastsim.training.counted import counted

GATHER, RING = "gather", "ring"
FLOAT = 4  # bytes per number of weights, optimizer states and gradients of unit rows


@dataclass(frozen=True)
class Plan:
    """A training step.

    batch_size: rows over all ranks.
    dim: width of the embeddings.
    ranks: number of processes.
    micro_batch_size: texts encoded at a time.
    columns: number of text columns; the first holds the anchors, the others the candidates.
    bytes_each: bytes per embedding element.
    loss: its name in `PRODUCTS`.
    exchange: "gather" or "ring".
    gpu: whether to plan for the torch backend on a GPU.
    parameters: number of parameters of the encoder; 0 leaves the encoder out.
    looked_up: how many of these are only looked up and not multiplied (word embeddings).
    layers, hidden, heads: numbers of layers, of hidden units and of attention heads of the encoder.
    tokens: tokens per text.
    sharding: of the encoder over the ranks: "none", "zero1", "zero2", "zero3" (DeepSpeed) or "fsdp"
        (FSDP2).
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
        """Anchors of the rank with the most."""
        return -(-self.batch_size // self.ranks)

    @property
    def candidates(self):
        """Candidates of all ranks."""
        return self.batch_size * (self.columns - 1)

    @property
    def held_candidates(self):
        """Candidates that a rank holds at a time: all, or on a ring those of three ranks."""
        if self.exchange == RING and self.ranks > 1:
            return min(self.ranks, 3) * self.rows * (self.columns - 1)
        return self.candidates


def memory(plan):
    """[(part, bytes on one rank, what they hold)]."""
    operand = 2 if plan.gpu and plan.bytes_each == 2 else 4
    parts = []
    if plan.parameters:
        parts += [*_encoder(plan), _micro_batch(plan)]
    local = plan.rows * plan.columns * plan.dim
    parts.append(("embeddings", 2 * local * plan.bytes_each, "of its rows, and their gradients"))
    if plan.ranks > 1:
        held = plan.held_candidates * plan.dim
        what = "of all processes, and their gradients"
        if plan.exchange == RING:
            what = f"of {min(plan.ranks, 3)} processes at a time, and their gradients"
        parts.append((f"candidates ({plan.exchange})", 2 * held * plan.bytes_each, what))
    units = (plan.rows + plan.held_candidates) * plan.dim * operand
    sums = plan.held_candidates * plan.dim * FLOAT
    parts.append(("unit rows", units + sums, "of anchors and candidates, and one gradient"))
    parts.append(_panel(plan, operand))
    return parts


def _micro_batch(plan):
    """The part of the memory for the activations of a micro-batch.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", equation 1, in bytes for 16-bit activations.
    """
    per_token = plan.hidden * (34 + 5 * plan.heads * plan.tokens / plan.hidden)
    activations = plan.micro_batch_size * plan.tokens * plan.layers * per_token
    texts, tokens = counted(plan.micro_batch_size, "text"), counted(plan.tokens, "token")
    what = f"activations of {texts} of {tokens}, for the backward pass"
    return "micro-batch", int(activations * plan.bytes_each / 2), what


def _panel(plan, operand):
    """The part of the memory for a panel of scores. operand: bytes per element of unit rows."""
    columns = plan.held_candidates
    if plan.gpu:
        # Scores and one more matrix in float32, score gradients in the operands' dtype.
        scores = min(panels.LARGEST_PANEL // FLOAT, plan.rows * columns)
        what = "scores and score gradients, of the torch backend"
        return "panel", (2 * FLOAT + operand) * scores, what
    products, alone = PRODUCTS[plan.loss][0], plan.ranks == 1
    kept = sizes.KEPT if products == 4 and alone else 0
    if products == 1:
        panel = sizes.PANEL // sizes.ONCE
    else:
        panel = sizes.BAND if alone and plan.loss not in ONE_SET else sizes.PANEL
    panel = max(panel, kept, sizes.FEWEST_ROWS * columns)
    if plan.loss in ONE_SET and alone:
        panel += sizes.KEPT
    scores = min(plan.rows * columns, panel)
    size = FLOAT * (scores + columns * plan.dim)
    if kept:  # more on a matrix unit. Candidates are packed twice, a number as three of 2 bytes.
        most = FLOAT * plan.rows * columns + 2 * 3 * 2 * columns * plan.dim
        size = max(size, min(amx_loss.KEPT, most))
    return "panel", size, "scores, and a packed copy of the candidates"


def _encoder(plan):
    """Weights, gradients and optimizer states of the encoder, as its sharding divides them.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", section 3. With FSDP2, `GradCache` reduces gradients once per step: weights stay
    gathered and gradients unsharded from the first micro-batch's backward pass to the last one's.
    """
    each, share = FLOAT * plan.parameters, 1 / plan.ranks
    if plan.sharding == "none" or plan.ranks == 1:
        return [("encoder", 4 * each, "weights, gradients, two states of AdamW")]
    if plan.sharding == "fsdp":
        return [
            ("encoder", int(3 * share * each), "its share of weights and two states of AdamW"),
            ("gathered", 2 * each, "weights and gradients, unsharded until the last micro-batch"),
        ]
    if plan.sharding == "zero3":
        what = "its share of weights, gradients and states of AdamW; layers are gathered singly"
        return [("encoder", int(4 * share * each), what)]
    if plan.sharding == "zero2":
        unsharded, what = 1, "weights, its share of gradients and two states of AdamW"
    else:
        unsharded, what = 2, "weights, gradients, its share of two states of AdamW"
    return [("encoder", int((unsharded + (4 - unsharded) * share) * each), what)]


def dense(plan):
    """Bytes on one rank of the three N x M matrices that a dense loss holds at least."""
    return 3 * 4 * plan.rows * plan.candidates


def times(plan, rate, bandwidth=None):
    """[(stage, minimum seconds, what it does)] at `rate` FLOP/s, `bandwidth` bytes/s of a rank."""
    stages = []
    if plan.parameters:
        texts = plan.rows * plan.columns
        forward = 2 * (plan.parameters - plan.looked_up) * plan.tokens * texts / rate
        stages.append(("encode", forward, "every text, forward pass"))
        stages.append(("encode again", 3 * forward, "every text, forward and backward pass"))
    products = PRODUCTS[plan.loss][plan.exchange == RING and plan.ranks > 1]
    operations = products * 2 * plan.rows * plan.candidates * plan.dim
    what = f"{products} products of {plan.rows:,} x {plan.candidates:,} x {plan.dim:,}"
    stages.append(("loss", operations / rate, what))
    if bandwidth and plan.ranks > 1:
        sent = sum(size for _, size in rounds(plan))
        what = f"{_size(sent)} to and from each process"
        seconds = sent / bandwidth
        if plan.exchange == RING:
            hidden = sum(min(work / rate, size / bandwidth) for work, size in rounds(plan))
            seconds -= hidden
            what += f"; {hidden:.3g} s more overlap with the products"
        stages.append(("exchange", seconds, what))
    return stages


def rounds(plan):
    """[(operations, bytes to and from a rank)] of the loss: forward and backward.

    The forward pass receives embeddings; the backward pass sends their gradients in float32, and on
    a ring receives the embeddings again.
    """
    on_ring = plan.exchange == RING and plan.ranks > 1
    products = PRODUCTS[plan.loss][on_ring]
    product = 2 * plan.rows * plan.candidates * plan.dim
    others = plan.candidates * (plan.ranks - 1) // plan.ranks * plan.dim
    backward = FLOAT + (plan.bytes_each if on_ring else 0)
    return [(product, others * plan.bytes_each), ((products - 1) * product, others * backward)]


# Bytes of device memory traffic per score besides the products, forward and backward of a loss over
# rows: each read or write has 4 bytes in float32 and 2 in float16. Counted, not measured.
# torch: the product writes the panel; maximum and sum read it; subtract, scale, exponential and
# weight read and write it; it is converted to float16, which two products read.
# compiled (if Triton is installed): the steps between the product and the conversion read the panel
# three times, for maximum, sum and score gradients.
# kernels: the product's epilogue writes float16 score gradients, which two products read.
PANEL_BYTES = {
    "torch": 4 + 2 * 4 + 4 * 8 + 6 + 2 * 2,
    "torch, compiled": 4 + 3 * 4 + 2 + 2 * 2,
    "triton, cuda": 2 + 2 * 2,
}


def estimates(plan, rate, memory_rate):
    """[(backend, seconds of a loss over rows, their parts)], calculated and not measured.

    memory_rate: bytes per second of the device's memory. The time of the products and that of the
    memory traffic are added.
    """
    products = next(seconds for stage, seconds, _ in times(plan, rate) if stage == "loss")
    scores = plan.rows * plan.candidates
    rows = []
    for name, bytes_per_score in PANEL_BYTES.items():
        traffic = scores * bytes_per_score / memory_rate
        what = f"products {products:.3g} s, {bytes_per_score} bytes per score {traffic:.3g} s"
        rows.append((name, products + traffic, what))
    return rows


def rate_here(plan):
    """FLOP/s of this machine's CPU, or GPU if the plan is for one; None if there is no GPU."""
    if plan.gpu and not torch.cuda.is_available():
        return None
    half = plan.gpu and plan.bytes_each == 2
    return measured_rate("cuda" if plan.gpu else "cpu", torch.bfloat16 if half else torch.float32)


def measured_rate(device, dtype=torch.float32, seconds=0.3):
    """FLOP/s of a matrix product of the size of a panel on this device."""
    x = torch.randn(1024, 768, device=device, dtype=dtype)
    y = torch.randn(768, 4096, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    per_wait = 100 if device == "cuda" else 1  # waiting for the GPU takes as long as a product
    x @ y
    wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(per_wait):
            x @ y
        wait()
        count += per_wait
    return 2 * x.shape[0] * x.shape[1] * y.shape[1] * count / (time.perf_counter() - start)


def encoder_shape(name, *, allow_pickle=False):
    """The arguments of `Plan` that describe a model, given by its folder or name.

    Loads no weights, except those of dense layers after the pooling. allow_pickle: whether these
    may be in a pickle file.
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

    folder = model_folder(name, allow_pickle=allow_pickle)
    parts = {"transformer": folder, "head": []}
    if (folder / "modules.json").is_file():
        parts = read_parts(folder, required=("transformer",), allow_pickle=allow_pickle)
    base, _ = adapted(parts["transformer"], allow_pickle=allow_pickle)
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
    """The plan as text; rate None: without times."""
    lines = [
        f"batch of {counted(plan.batch_size, 'row')}, {counted(plan.candidates, 'candidate')} of"
        f" width {plan.dim:,}, {counted(plan.ranks, 'process', 'processes')}; for each process:",
        "",
    ]
    parts = memory(plan)
    parts.append(("total", sum(size for _, size, _ in parts), ""))
    lines += [f"  {part:<20}{_size(size):>12}  {what}" for part, size, what in parts]
    lines += [f"  {'(dense scores':<20}{_size(dense(plan)):>12}  that a dense loss would add)", ""]
    if rate is None:
        lines.append("  no time: there is no GPU here to measure; give its TFLOP/s with --rate")
    else:
        stages = times(plan, rate, bandwidth)
        stages.append(("total", sum(seconds for _, seconds, _ in stages), ""))
        lines += [f"  {stage:<20}{seconds:>10.3g} s  {what}" for stage, seconds, what in stages]
        lines.append(f"  at {rate / 1e12:.3g} TFLOP/s, counting arithmetic only: a lower bound")
    if plan.gpu:
        lines.append(
            "  memory of the torch backend, the default on a GPU; Triton and CUDA kernels are used"
            " if `fastsim verify` has found them correct and faster"
        )
    if memory_rate and rate is not None:
        lines += ["", "  the loss by backend, calculated and not measured"]
        for backend, seconds, what in estimates(plan, rate, memory_rate):
            lines.append(f"  {backend:<20}{seconds:>10.3g} s  {what}")
    return "\n".join(line.rstrip() for line in lines)


def _size(count):
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"
