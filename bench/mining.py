"""The time and memory of `fastsim.mine_hard_negatives` in a large corpus.

    python -m bench.mining [--rows 100000] [--dim 384]

Embeddings are random; each query is its positive plus noise. Writes
bench/results/mining/DEVICE.json.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

import fastsim
from fastsim.benchmark.results import environment

RESULTS = Path(__file__).resolve().parent / "results/mining"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=384)
    options = parser.parse_args()
    about = environment()
    torch.manual_seed(0)
    corpus = torch.randn(options.rows, options.dim)
    queries = corpus + 0.7 * torch.randn_like(corpus)
    limits = {"count": 4, "ranks": (5, 40), "relative_margin": 0.05}
    fastsim.mine_hard_negatives(queries[:256], corpus[:256], **limits)  # loads libraries
    before, start = peak(), time.perf_counter()
    rows, scores = fastsim.mine_hard_negatives(queries, corpus, **limits)
    seconds, after = time.perf_counter() - start, peak()
    check(queries, corpus, rows, scores)
    file = RESULTS / f"{about['device']}.json"
    result = {
        "rows": options.rows,
        "columns": options.rows,
        "dim": options.dim,
        "options": limits,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "rise MB": (after - before) / 2**20,
        "inputs MB": 2 * corpus.nbytes / 2**20,
        "matrix MB": 4 * options.rows**2 / 2**20,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def peak():
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(queries, corpus, rows, scores):
    """Compares the negatives of a few queries with a search of the whole corpus in float64."""
    unit = torch.nn.functional.normalize(corpus.double(), dim=1)
    for row in torch.randint(len(queries), (20,)).tolist():
        cosines = unit @ torch.nn.functional.normalize(queries[row].double(), dim=0)
        positive, cosines[row] = float(cosines[row]), -torch.inf
        near = cosines.topk(40).indices
        expected = [r for r in near.tolist()[4:] if float(cosines[r]) <= 0.95 * positive][:4]
        assert rows[row].tolist() == expected, (row, rows[row].tolist(), expected)
        assert (scores[row].double() - cosines[rows[row]]).abs().max() < 1e-5


if __name__ == "__main__":
    main()
