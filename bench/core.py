"""python -m bench.core: the losses on a CPU against their eager formulas, sentence-transformers
and the bare matrix products, forward and backward, float32, all taken in turns.

The bare products are library products over panels of a reused buffer: what an exact loss cannot
avoid. InfoNCE one way and SigLIP need three (scores, gradient of either side), symmetric InfoNCE
four (scores twice), the full triplet one.
"""

import click
import torch
from torch.nn import functional

import fastsim
from bench.results import write
from bench.turns import in_turns

SIZES = ((64, 384), (512, 384), (4096, 384), (8192, 384), (8192, 768))
PRODUCTS = {"info_nce": 3, "info_nce symmetric": 4, "siglip": 3, "full_triplet": 1}


def eager_cosines(x, y):
    return functional.normalize(x, dim=1) @ functional.normalize(y, dim=1).T


def eager_info_nce(x, y):
    return functional.cross_entropy(eager_cosines(x, y) * 20, torch.arange(len(x)))


def eager_symmetric(x, y):
    logits, labels = eager_cosines(x, y) * 20, torch.arange(len(x))
    return (
        functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)
    ) / 2


def eager_siglip(x, y):
    logits = eager_cosines(x, y) * 10 - 10
    return -functional.logsigmoid((2 * torch.eye(len(x)) - 1) * logits).sum() / len(x)


def eager_full_triplet(x, y):
    scores = eager_cosines(x, y)
    positive = scores.diagonal()
    eye = torch.eye(len(x), dtype=torch.bool)
    mean = (scores.sum(1) - positive) / (len(x) - 1)
    near = scores.masked_fill(eye | (scores > positive[:, None]), -2.0).max(1).values
    return (torch.relu(mean - positive + 0.25) + torch.relu(near - positive + 0.25)).mean()


LOSSES = {
    "info_nce": (fastsim.info_nce, {}, eager_info_nce),
    "info_nce symmetric": (fastsim.info_nce, {"symmetric": True}, eager_symmetric),
    "siglip": (fastsim.siglip, {}, eager_siglip),
    "full_triplet": (fastsim.full_triplet, {}, eager_full_triplet),
}


def sentence_transformers_loss(name, **options):
    """A sentence-transformers loss on given embeddings, or None where it is not installed."""
    try:
        from sentence_transformers.sentence_transformer import losses
    except ImportError:
        return None
    loss = getattr(losses, name)(torch.nn.Identity(), **options)
    return lambda columns, labels=None: loss.compute_loss_from_embeddings(columns, labels)


def both_ways(function, *leaves):
    """A callable that runs function(*leaves) and its backward pass."""

    def run():
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward()

    return run


def bare_products(x, y, count):
    """`count` products of an exact loss, panel by panel: scores, x's gradient, y's gradient."""
    rows, width = x.shape
    tall = min(rows, 512)
    left, right = functional.normalize(x, dim=1), functional.normalize(y, dim=1)
    panel, grad_x, grad_y = (
        torch.empty(tall, rows),
        torch.empty(rows, width),
        torch.zeros(rows, width),
    )

    def run():
        for top in range(0, rows, tall):
            part = left[top : top + tall]
            scores = panel[: len(part)]
            torch.mm(part, right.T, out=scores)
            if count == 4:
                torch.mm(part, right.T, out=scores)
            if count > 1:
                torch.mm(scores, right, out=grad_x[top : top + tall])
                grad_y.addmm_(scores.T, part)

    return run


def rivals(rows, width):
    """{name: callable} at one size."""
    x = torch.randn(rows, width)
    y = (x + torch.randn(rows, width)).requires_grad_()
    x.requires_grad_()
    table = {}
    for name, (loss, options, eager) in LOSSES.items():
        table[f"{name}: fastsim"] = both_ways(
            lambda x, y, loss=loss, options=options: loss(x, y, **options, backend="cpu"), x, y
        )
        table[f"{name}: eager"] = both_ways(eager, x, y)
    peer = sentence_transformers_loss("MultipleNegativesRankingLoss")
    if peer:
        table["info_nce: sentence-transformers"] = both_ways(lambda x, y: peer([x, y]), x, y)
    for count in (1, 3, 4):
        table[f"{count} products"] = bare_products(x.detach(), y.detach(), count)
    return table


def cosent_rivals(count, distinct):
    """CoSENT over a list of scores."""
    scores = torch.randn(count).tanh().requires_grad_()
    labels = torch.randint(0, distinct, (count,)) if distinct < count else torch.randperm(count)
    labels = labels.float()
    table = {
        "cosent: fastsim": both_ways(lambda s: fastsim.cosent(s, labels, backend="cpu"), scores)
    }
    peer = sentence_transformers_loss("CoSENTLoss", similarity_fct=lambda s, _: s)
    if peer:
        table["cosent: sentence-transformers"] = both_ways(lambda s: peer([s, s], labels), scores)
    return table


@click.command()
@click.option("--rounds", default=7, show_default=True, help="rounds at the large sizes")
@click.option("--out", default="core", show_default=True, help="name of the result file")
def main(rounds, out):
    """Measure, print, and write bench/results/<device>/<out>.jsonl."""
    torch.manual_seed(0)
    rows = []
    cases = [({"rows": n, "width": d}, rivals(n, d), n) for n, d in SIZES]
    for distinct in (26, 1_000_000):
        case = {"scores": 1_000_000, "distinct labels": distinct}
        cases.append((case, cosent_rivals(1_000_000, distinct), 8192))
    for case, table, size in cases:
        times = in_turns(table, max(rounds, rounds * 2048 // size))
        best = {name: min(t) for name, t in times.items()}
        for name, seconds in times.items():
            ordered = sorted(seconds)
            rows.append(
                case
                | {
                    "name": name,
                    "best ms": round(best[name] * 1e3, 4),
                    "median ms": round(ordered[len(ordered) // 2] * 1e3, 4),
                    "rounds": len(seconds),
                }
            )
        click.echo(", ".join(f"{k} {v}" for k, v in case.items()))
        for name in sorted(best):
            click.echo(f"  {name:34} {best[name] * 1e3:10.3f} ms{ratios(name, best)}")
    click.echo(f"wrote {write(out, rows)}")


def ratios(name, best):
    """How a fastsim row stands against its rivals, as text."""
    loss, _, who = name.partition(": ")
    if who != "fastsim":
        return ""
    text = "".join(
        f"   {best[f'{loss}: {other}'] / best[name]:.2f} x as fast as {other}"
        for other in ("eager", "sentence-transformers")
        if f"{loss}: {other}" in best
    )
    if loss in PRODUCTS:
        bare = best[f"{PRODUCTS[loss]} products"]
        text += f"   {best[name] / bare:.2f} of {PRODUCTS[loss]} bare products"
    return text


if __name__ == "__main__":
    main()
