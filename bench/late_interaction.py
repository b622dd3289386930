"""python -m bench.late_interaction: MaxSim and its gradient beside those of sentence-transformers.

The loss is InfoNCE over the scores of B queries and B documents, with in-batch negatives and
embeddings of norm 1. Measures the time of forward + backward, in turns in one process, and how far
a call raises the peak memory of a fresh process beyond inputs and gradients. Writes
late_interaction.jsonl in bench/results/<device>.
"""

import click
import torch

from bench import time_and_memory
from bench.results import write
from bench.tables import from_rows
from fastsim import late_interaction
from fastsim.benchmark import results
from fastsim.benchmark.cases import Problem

# name -> (number of queries and of documents, tokens of a query, tokens of a document, width)
SIZES = {"ColBERT": (128, 32, 300, 128), "ColPali": (16, 32, 1030, 128)}
SMALL = (4, 32, 64, 128)
DTYPES = ("float32", "bfloat16")
NAME = "late_interaction"


def fastsim_loss(backend, similarity="dot"):
    def call(queries, documents):
        return late_interaction(queries, documents, similarity=similarity, backend=backend)

    return call


def sentence_transformers_loss(queries, documents):
    from sentence_transformers.multi_vector_encoder.scoring import colbert_scores

    scores = colbert_scores(queries, documents[:, None])
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(queries)))


CALLS = {
    "fastsim cpu": fastsim_loss("cpu"),
    "fastsim cpu, cosines": fastsim_loss("cpu", "cosine"),
    "fastsim torch": fastsim_loss("torch"),
    "sentence-transformers": sentence_transformers_loss,
}


def problem(size, dtype):
    """Queries (B, Lq, D) and documents (B, Ld, D) of tokens with norm 1."""
    batch, query_tokens, document_tokens, width = size
    generator = torch.Generator().manual_seed(0)
    sides = (
        torch.randn(batch, tokens, width, generator=generator)
        for tokens in (query_tokens, document_tokens)
    )
    unit = (torch.nn.functional.normalize(side, dim=-1) for side in sides)
    return Problem(None, [side.to(getattr(torch, dtype)).requires_grad_() for side in unit])


def peak(name, size, dtype):
    """Megabytes (2^20 bytes) of one call; runs in a fresh process."""
    call = CALLS[name]
    return time_and_memory.rise(call, problem(size, dtype), call, problem(SMALL, dtype))


def measured(what, dtype, seconds):
    """Rows of one size and dtype."""
    size = SIZES[what]
    about = {"what": what, "size": size, "dtype": dtype}
    inputs = problem(size, dtype)
    return time_and_memory.rows(about, CALLS, inputs, seconds, peak, size, dtype)


@from_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    lines = [
        "| size | dtype | by | time | memory |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for row in rows:
        batch, query_tokens, document_tokens, width = row["size"]
        size = f"{row['what']}: {batch} x {query_tokens}, {batch} x {document_tokens}, {width}"
        best = f"{min(row['repeats ms']):,.0f} ms" if "repeats ms" in row else row["not measured"]
        above = f"{row['MB']:,.0f} MB" if "MB" in row else row["memory"]
        lines.append(f"| {size} | {row['dtype']} | {row['by']} | {best} | {above} |")
    return "\n".join(lines)


@click.command()
@click.option("--what", multiple=True, type=click.Choice([*SIZES]), default=[*SIZES])
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=DTYPES)
@click.option("--seconds", default=4.0, help="Time for each size and dtype.")
def main(what, dtypes, seconds):
    """Measure and write."""
    about = results.environment()
    rows = []
    for name in what:
        for dtype in dtypes:
            for row in measured(name, dtype, seconds):
                rows.append(row)
                click.echo(row)
    click.echo(write(NAME, rows, about))


if __name__ == "__main__":
    main()
