"""python -m bench.large_batch: a step of GradCache with a large batch, and a training run.

The step, with the bundled model, has three stages: encoding without a graph, the loss over all
embeddings, encoding again with the gradient. It runs beside CachedMultipleNegativesRankingLoss of
sentence-transformers with the same batch and mini-batch. All micro-batches take the same time, so a
share of them is encoded and the time multiplied; the stage of the loss is measured as a whole.
Operations are those that torch dispatches.

The training is on pairs of SICK and STS-B sentences with thousands of negatives in each step. It
runs in a fresh process, of which the peak memory is read.
"""

import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastsim
from bench.results import write
from bench.tables import from_rows, markdown
from fastsim.encoders.encoder import EMBEDDED
from fastsim.grad_cache import GradCache, MicroBatches

NAME = "large_batch"
LENGTH = 16  # tokens; most sentences of the data have no more
ROUNDS = 3

TRAIN = """
import json, sys
from fastsim.training.run import Options, train
result = train(Options(**json.loads(sys.argv[1])))
losses = [entry["loss"] for entry in result["history"] if "loss" in entry]
print(json.dumps({"losses": losses, "seconds": result["seconds"]}))
"""


def sentence_pairs(folder):
    """Pairs of SICK and STS-B with distinct first sentences."""
    pairs = {}
    for file in ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt"):
        with open(folder / "sick" / file, encoding="utf-8") as handle:
            for row in csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE):
                pairs.setdefault(row["sentence_A"], row["sentence_B"])
    for file in ("train.csv", "dev.csv", "test.csv"):
        with open(folder / "stsb" / file, encoding="utf-8", newline="") as handle:
            for row in csv.reader(handle):
                pairs.setdefault(row[0], row[1])
    return list(pairs.items())


class Count(TorchDispatchMode):
    """A context that counts the operations dispatched within it."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def operations(function):
    """The number of operations that a call dispatches."""
    with Count() as count:
        function()
    return count.operations


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def our_loss(x, y):
    """The stage of the loss: the loss and the gradients of the embeddings."""
    leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
    fastsim.info_nce(*leaves).backward()


def our_encoding(encoder, columns, size):
    """(seconds of encoding without a graph, seconds of encoding again with the gradient)."""
    encoded = []

    def loss(x, y):
        encoded.append((time.perf_counter(), x, y))
        return fastsim.info_nce(x, y)

    cache = GradCache(encoder, loss, micro_batch_size=size)
    start = time.perf_counter()
    cache.backward(*columns)
    end = time.perf_counter()
    ((middle, x, y),) = encoded
    return middle - start, end - middle - seconds(lambda: our_loss(x, y))


def their_loss(loss, x, y, size):
    """The stage of the loss in sentence-transformers, on embeddings in mini-batches."""
    parts = [[part.detach().requires_grad_() for part in side.split(size)] for side in (x, y)]
    loss.calculate_loss(parts, with_backward=True)


def step(batch_size, size, share, pairs):
    """Result rows with the best time of each stage of both libraries, which take turns."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from fastsim.encoders.model_files import model_folder

    folder = str(model_folder(EMBEDDED))
    texts = [[pairs[i % len(pairs)][side] for i in range(batch_size)] for side in (0, 1)]
    used = max(1, round(batch_size / size * share)) * size
    x, y = torch.randn(batch_size, 384), torch.randn(batch_size, 384)

    encoder = fastsim.Encoder.from_pretrained(folder, max_length=LENGTH).train()
    columns = [
        MicroBatches(encoder.tokenize(part) for part in MicroBatches.of(column[:used], size))
        for column in texts
    ]
    model = SentenceTransformer(folder, device="cpu").train()
    model.max_seq_length = LENGTH
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)
    features = []
    for column in texts:
        padded = model.preprocess(column)
        features.append(
            {k: v[:used] if isinstance(v, torch.Tensor) else v for k, v in padded.items()}
        )

    def embed(with_grad):
        for feature in features:
            embedded = loss.embed_minibatch_iter(
                sentence_feature=feature, with_grad=with_grad, copy_random_state=not with_grad
            )
            for vectors, _ in embedded:
                if with_grad:
                    (vectors * torch.ones_like(vectors)).sum().backward()

    def ours():
        encode, again = our_encoding(encoder, columns, size)
        return encode, seconds(lambda: our_loss(x, y)), again

    def theirs():
        encode = seconds(lambda: embed(False))
        return encode, seconds(lambda: their_loss(loss, x, y, size)), seconds(lambda: embed(True))

    times = {"fastsim": [], "sentence-transformers": []}
    for _ in range(ROUNDS):
        for name, measured in zip(times, (ours, theirs), strict=True):
            times[name].append(measured())
    narrow = x[:, :8], y[:, :8]
    counts = [
        operations(lambda: our_loss(*narrow)),
        operations(lambda: their_loss(loss, *narrow, size)),
    ]
    common = {"batch": batch_size, "micro batch": size, "texts encoded": 2 * used}
    return [
        stages(name, common, *map(min, zip(*rounds, strict=True)), count)
        for (name, rounds), count in zip(times.items(), counts, strict=True)
    ]


def stages(name, common, encode, loss, again, operations):
    """A result row, with the times of encoding extrapolated to the whole batch."""
    factor = 2 * common["batch"] / common["texts encoded"]
    times = {"encode s": factor * encode, "loss s": loss, "encode again s": factor * again}
    share = loss / sum(times.values())
    row = {"part": "step", "name": name} | common
    row |= {key: round(value, 3) for key, value in times.items()}
    row |= {"loss share": round(share, 4), "loss operations": operations}
    click.echo(json.dumps(row))
    return row


def training(negatives, size, steps, pairs):
    """The result row of a few steps of `fastsim train` in a fresh process."""
    rows = pairs[: steps * negatives]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        lines = [json.dumps({"anchor": a, "positive": b}) for a, b in rows]
        file.write_text("\n".join(lines), encoding="utf-8")
        options = {"train": str(file), "output": f"{folder}/model", "loss": "info_nce"}
        options |= {"batch_size": negatives, "micro_batch_size": size, "max_steps": steps}
        options |= {"max_length": LENGTH, "logging_steps": 1}
        options |= {"progress": False, "cpu": True}
        command = [sys.executable, "-c", TRAIN, json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    row = {"part": "training", "batch": negatives, "micro batch": size, "steps": steps}
    row |= json.loads(done.stdout.splitlines()[-1]) | {"peak GB": round(peak, 2)}
    click.echo(json.dumps(row))
    return row


@from_rows(NAME)
def table(rows):
    """The stages of a step with both libraries, and the training run, for bench/README.md."""
    steps = [row for row in rows if row["part"] == "step"]
    lines = [
        [
            *(row["name"], f"{row['batch']:,}", f"{row['micro batch']}"),
            *(f"{row[stage]:,.1f} s" for stage in ("encode s", "loss s", "encode again s")),
            f"{row['loss operations']:,}",
        ]
        for row in steps
    ]
    head = ["by", "batch", "micro-batch", "encode", "loss", "encode again"]
    trained = [
        f"`fastsim train` with {row['batch']:,} pairs a batch, {row['micro batch']} a micro-batch:"
        f" {row['seconds'] / row['steps']:,.0f} s a step, {row['peak GB']:.1f} GB at its peak."
        for row in rows
        if row["part"] == "training"
    ]
    return "\n\n".join([markdown([*head, "operations of the loss"], lines), *trained])


@click.command()
@click.option("--batch-size", default=16384, show_default=True)
@click.option("--micro-batch-size", default=32, show_default=True)
@click.option(
    "--share", default=0.0625, show_default=True, help="Share of the micro-batches to encode."
)
@click.option("--negatives", default=4096, show_default=True, help="Batch size of the training.")
@click.option("--steps", default=2, show_default=True, help="Steps of the training.")
@click.option("--data", type=Path, required=True, help="Folder with sick/ and stsb/.")
@click.option("--out", default=NAME, show_default=True, help="Name of the result file.")
def main(batch_size, micro_batch_size, share, negatives, steps, data, out):
    """Measure, print, and write bench/results/<device>/<out>.jsonl."""
    pairs = sentence_pairs(data)
    results = [training(negatives, micro_batch_size, steps, pairs)]
    results += step(batch_size, micro_batch_size, share, pairs)
    click.echo(f"wrote {write(out, results)}")


if __name__ == "__main__":
    main()
