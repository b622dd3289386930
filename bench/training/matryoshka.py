"""python -m bench.training.matryoshka: prefixes trained in one sweep, beside the full width alone.

The same encoder (all-MiniLM-L6-v2), the same entailed pairs of SICK in the same order, the same
steps, in micro-batches (`fastsim.grad_cache`); one model trained with InfoNCE of the full width,
one with its sum over four widths (`fastsim.losses.Matryoshka`). Retrieval at each width: the
sentence that each of the test part's anchors entails, among all of them, by the first numbers of
the embeddings. Writes bench/results/training/matryoshka.json.
"""

import time

import click
import torch

import fastsim
from bench.training.late_interaction import METRICS, Encoder, mean, pairs, places, write_ways
from bench.training.tables import percent, read
from fastsim import losses
from fastsim.engine.sweep import sum_over
from fastsim.grad_cache import GradCache

NAME, WIDTHS = "matryoshka", (384, 256, 128, 64)
TEMPERATURE = 0.05


def full_width():
    return losses.InfoNCE(temperature=TEMPERATURE)


def all_widths():
    return losses.Matryoshka(full_width(), WIDTHS)


WAYS = {"the full width alone": full_width, "all four widths": all_widths}


def in_one_sweep(loss, rows):
    """Whether a batch of so many rows is one sweep over the widths."""
    if not isinstance(loss, losses.Matryoshka):
        return False
    sides = torch.randn(2, rows, WIDTHS[0])
    with sum_over(loss.widths, loss.weights) as asked:
        loss.loss(*sides)
    return asked.served


@torch.no_grad()
def retrieval(encoder, held, size=64):
    """{width: metrics} of the first place at which an entailed sentence stands."""
    encoder.eval()
    anchors = list(dict.fromkeys(anchor for anchor, _ in held))
    candidates = list(dict.fromkeys(text for _, text in held))
    x, y = (
        torch.cat([mean(*encoder(side[k : k + size])) for k in range(0, len(side), size)])
        for side in (anchors, candidates)
    )
    found = {}
    for width in WIDTHS:
        scores = fastsim.cosine_similarity(x[:, :width], y[:, :width])
        found[width] = places(scores, anchors, candidates, held)
    return found


def trained(way, steps, batch_size, rate, held):
    torch.manual_seed(0)
    encoder, rows, loss = Encoder(), pairs("train"), WAYS[way]()
    before = retrieval(encoder, held)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate)
    step = GradCache(lambda texts: mean(*encoder(texts)), loss, micro_batch_size=32, module=encoder)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    start, values = time.perf_counter(), []
    encoder.train()
    for number in range(steps):
        some = [rows[order[(number * batch_size + k) % len(rows)]] for k in range(batch_size)]
        optimizer.zero_grad()
        values.append(step.backward(*map(list, zip(*some, strict=True))).item())
        optimizer.step()
    seconds = round(time.perf_counter() - start, 1)
    after = retrieval(encoder, held)
    return {
        "in one sweep": in_one_sweep(loss, batch_size),
        "before": before,
        "after": after,
        "seconds": seconds,
        "losses": values,
    }


def table(_):
    """The table in bench/README.md."""
    head = [f"{metric} at {width}" for metric in METRICS for width in WIDTHS]
    lines = [f"| trained on | {' | '.join(head)} |", f"| --- |{' ---: |' * len(head)}"]
    result = read(NAME)
    models = []
    for way, found in (result["ways"] if result else {}).items():
        if not models:
            models.append(("nothing", found["before"]))
        models.append((way, found["after"]))
    for what, found in models:
        cells = [percent(found[str(width)][metric]) for metric in METRICS for width in WIDTHS]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    if result:
        lines += ["", f"{result['steps']} steps of {result['batch size']} pairs."]
    return "\n".join(lines)


@click.command()
@click.option("--held-out", default=300, show_default=True, help="Pairs of the test part.")
@click.option("--steps", default=3, show_default=True)
@click.option("--batch-size", default=640, show_default=True)
@click.option("--learning-rate", default=1e-4, show_default=True)
def main(held_out, steps, batch_size, learning_rate):
    """Train both, print, and write."""
    held, settings = pairs("test")[:held_out], (steps, batch_size, learning_rate)
    write_ways(NAME, {way: trained(way, *settings, held) for way in WAYS}, *settings, held_out)


if __name__ == "__main__":
    main()
