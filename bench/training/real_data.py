"""Training on STS-B and SICK by the command line, each experiment one file of results.

Usage: FASTSIM_DATA=../shared/data python -m bench.training.real_data EXPERIMENT...
Experiments: see EXPERIMENTS at the end; `all` runs every one. Results: bench/results/training/.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.training.folders import DATA, RESULTS, ROOT
from bench.training.sick import (
    entailed,
    entailment_pairs,
    paraphrase_groups,
    paraphrase_pairs,
    related,
    retrieval_set,
    sick_file,
    sick_rows,
)
from fastsim.benchmark.results import commit, environment

STSB = ["--columns", "sentence1,sentence2,score"]
SICK = ["--columns", "sentence1=sentence_A,sentence2=sentence_B,score=relatedness_score"]
SICK_CLASSES = ["--columns", "sentence1=sentence_A,sentence2=sentence_B,label=entailment_judgment"]
SETTINGS = ["--batch-size", "32", "--learning-rate", "5e-5", "--warmup", "0.1", "--seed", "0"]
SETTINGS += ["--max-length", "64"]
SHORT = ["--max-steps", "50"]  # a third of an epoch of SICK
GENTLE = ["--learning-rate", "2e-5"]  # the encoder is near the ceiling before


COMMIT = commit()  # at the start: a run is long


def fastsim(*arguments):
    """Run a command of fastsim; its standard output."""
    command = [sys.executable, "-m", "fastsim", *map(str, arguments)]
    print("$ fastsim", *arguments, flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def train(output, *arguments):
    """`fastsim train`; what it wrote down, and the command as a user would type it."""
    command = ["train", *SETTINGS, *arguments]
    fastsim(*command, "--output", output, "--no-progress")
    result = json.loads((output / "fastsim_training.json").read_text())
    return result, "fastsim " + " ".join(_shown(part) for part in command)


def evaluate(model, data, *arguments):
    """The metrics of `fastsim evaluate --json`."""
    command = ["evaluate", "--model", model, "--data", data, "--max-length", 64, "--json"]
    found = json.loads(fastsim(*command, *arguments).splitlines()[-1])
    return {name: value for name, value in found.items() if name not in ("model", "data")}


def baseline(output, *arguments):
    """sentence-transformers' trainer; what it printed."""
    script = ROOT / "bench/training/baseline.py"
    command = [sys.executable, script, "--output", output, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def write(name, **result):
    """One result file, with what it was measured on."""
    about = environment() | {"experiment": name, "commit": COMMIT}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(about | result, indent=1) + "\n")


def _shown(part):
    return Path(part).name if os.sep in str(part) else str(part)


# ---- STS-B ----


def stsb_cosent(folder):
    """One epoch of CoSENT and the Spearman on the test part."""
    test = DATA / "stsb/test.csv"
    result, command = train(
        folder / "m", "--train", DATA / "stsb/train.csv", "--loss", "cosent", *STSB
    )
    write(
        "stsb_cosent",
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before=evaluate("all-minilm-l6-v2", test, *STSB),
        after=evaluate(folder / "m", test, *STSB),
    )


def stsb_sentence_transformers(folder):
    """The same epoch by sentence-transformers' trainer and CoSENTLoss."""
    data = DATA / "stsb"
    found = baseline(folder / "m", "--train", data / "train.csv", "--test", data / "test.csv")
    write("stsb_sentence_transformers", command="python bench/training/baseline.py", after=found)


def stsb_time(folder, steps=12, turns=3):
    """Seconds of training of both trainers, in turns."""
    ours, theirs = [], []
    data = DATA / "stsb/train.csv"
    for turn in range(turns):
        result, command = train(
            folder / f"m{turn}", "--train", data, "--loss", "cosent", *STSB, "--max-steps", steps
        )
        ours.append(result["seconds"])
        theirs.append(baseline(folder / "r", "--train", data, "--max-steps", steps)["seconds"])
    write(
        "stsb_time",
        command=command,
        steps=steps,
        fastsim_seconds=ours,
        sentence_transformers_seconds=theirs,
        ratio_of_best=min(ours) / min(theirs),
    )


# ---- SICK, encoders ----


def sick_relatedness(folder):
    """CoSENT on the relatedness scores."""
    tsv = ["--format", "tsv", *SICK]
    result, command = train(folder / "m", "--train", sick_file("train"), "--loss", "cosent", *tsv)
    write(
        "sick_cosent",
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before=evaluate("all-minilm-l6-v2", sick_file("test"), *tsv),
        after=evaluate(folder / "m", sick_file("test"), *tsv),
    )


def sick_classification(folder):
    """Three classes; before: the untrained encoder's features with scikit-learn's classifier."""
    import torch
    from sklearn.linear_model import LogisticRegression

    import fastsim as package

    tsv = ["--format", "tsv", *SICK_CLASSES]
    result, command = train(
        folder / "m",
        "--train",
        sick_file("train"),
        "--loss",
        "classification",
        *tsv,
        *("--loss-learning-rate", "3e-2", "--epochs", 2),
    )
    encoder = package.Encoder.from_pretrained("all-minilm-l6-v2", max_length=64)
    features = {}
    for part in ("train", "test"):
        rows = sick_rows(part)
        u, v = (encoder.encode([row[c] for row in rows]) for c in ("sentence_A", "sentence_B"))
        labels = [row["entailment_judgment"] for row in rows]
        features[part] = torch.cat([u, v, (u - v).abs()], 1).numpy(), labels
    head = LogisticRegression(max_iter=1000).fit(*features["train"])
    write(
        "sick_classification",
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before={"accuracy": head.score(*features["test"])},
        after=evaluate(folder / "m", sick_file("test"), *tsv),
    )


def prepared(name, make, loss, *more, judge=None):
    """An experiment on files made from SICK, for one loss; `judge` makes the test part's."""

    def run(folder):
        data = {"train": make(folder, "train"), "test": (judge or make)(folder, "test")}
        result, command = train(folder / "m", "--train", data["train"], "--loss", loss, *more)
        write(
            f"{name}_{loss}",
            command=command,
            steps=result["steps"],
            seconds=result["seconds"],
            before=evaluate("all-minilm-l6-v2", data["test"]),
            after=evaluate(folder / "m", data["test"]),
        )

    return run


# Losses on the groups, with what their defaults do not suit: a multi-similarity's hinges are to lie
# between the cosines of paraphrases and those of other sentences of a scene, all above 0.5.
GROUPED = {
    "sup_con": (),
    "nt_xent": (),
    "multi_similarity": ("--loss-option", "base=0.9"),
    "batch_hard_triplet": (),
    "siglip": (),
    "cosent_matrix": (),
    "matrix_cross_entropy": (),
    "matrix_mse": (),
}


def grouped(loss):
    """Training on groups of paraphrases, judged by telling paraphrases apart."""
    more = GROUPED[loss]
    return prepared("sick_groups", paraphrase_groups, loss, *GENTLE, *more, judge=paraphrase_pairs)


# ---- LoRA, prompts, mined negatives ----


def stsb_lora(folder, steps=60):
    """CoSENT with LoRA alone: a third of an epoch."""
    lora = ("--lora", 16, "--learning-rate", "5e-4", "--max-steps", steps)
    result, command = train(
        folder / "m", "--train", DATA / "stsb/train.csv", "--loss", "cosent", *STSB, *lora
    )
    test = DATA / "stsb/test.csv"
    write(
        "stsb_lora",
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before=evaluate("all-minilm-l6-v2", test, *STSB),
        after=evaluate(folder / "m", test, *STSB),
    )


def retrieval_mined(folder):
    """InfoNCE with mined negatives, prompts and LoRA, judged by the search of the test part."""
    pairs = entailment_pairs(folder, "train")
    corpus, triplets = folder / "corpus.txt", folder / "triplets.jsonl"
    texts = {row[side]: None for row in sick_rows("train") for side in ("sentence_A", "sentence_B")}
    corpus.write_text("\n".join(texts), encoding="utf-8")
    prompts = ("--prompt", "query=query: ", "--prompt", "document=passage: ")
    mining = ("mine", "--pairs", pairs, "--corpus", corpus, "--output", triplets)
    mining += ("--first", 3, "--relative-margin", 0.05, "--max-length", 64)
    fastsim(*mining)
    lora = ("--lora", 16, "--learning-rate", "5e-4")
    result, command = train(
        folder / "m", "--train", triplets, "--loss", "info_nce", *prompts, *lora
    )
    test = retrieval_set(folder / "test", "test")

    def judged(model, *more):
        asked = ("evaluate", "--model", model, "--retrieval", test, "--max-length", 64, "--json")
        found = json.loads(fastsim(*asked, *more).splitlines()[-1])
        return {name: value for name, value in found.items() if isinstance(value, float)}

    write(
        "sick_retrieval_mined",
        mining="fastsim " + " ".join(_shown(part) for part in mining),
        triplets=result["rows"],
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before=judged("all-minilm-l6-v2"),
        before_with_prompts=judged("all-minilm-l6-v2", *prompts),
        after=judged(folder / "m"),
    )


def sick_prompts(folder):
    """InfoNCE on entailed pairs with a prompt a side."""
    data = {part: entailment_pairs(folder, part) for part in ("train", "test")}
    prompts = ("--prompt", "query=query: ", "--prompt", "document=passage: ")
    result, command = train(
        folder / "m", "--train", data["train"], "--loss", "info_nce", *prompts, *GENTLE
    )
    write(
        "sick_pairs_prompts",
        command=command,
        steps=result["steps"],
        seconds=result["seconds"],
        before=evaluate("all-minilm-l6-v2", data["test"]),
        after=evaluate(folder / "m", data["test"]),
    )


def demo(folder):
    """`fastsim demo`."""
    start = time.perf_counter()
    fastsim("demo", "--output", folder / "m", "--no-progress")
    seconds = time.perf_counter() - start
    result = json.loads((folder / "m/fastsim_training.json").read_text())
    write(
        "demo",
        command="fastsim demo",
        steps=result["steps"],
        seconds=seconds,
        before=result["before"],
        after=result["after"],
    )


# ---- cross-encoders ----


def crossed(name, make, loss):
    """A cross-encoder on a file made from SICK, for one loss."""

    def run(folder):
        data = {part: make(folder, part) for part in ("train", "test")}
        result, command = train(
            folder / "m",
            *("--train", data["train"], "--loss", loss, "--architecture", "cross-encoder"),
            *SHORT,
        )
        write(
            f"cross_{name}_{loss}",
            command=command,
            steps=result["steps"],
            seconds=result["seconds"],
            after=evaluate(folder / "m", data["test"]),
        )

    return run


EXPERIMENTS = {
    "demo": demo,
    "stsb_cosent": stsb_cosent,
    "stsb_sentence_transformers": stsb_sentence_transformers,
    "stsb_time": stsb_time,
    "sick_cosent": sick_relatedness,
    "sick_classification": sick_classification,
    "sick_info_nce": prepared("sick_pairs", entailment_pairs, "info_nce"),
    "sick_full_triplet": prepared("sick_pairs", entailment_pairs, "full_triplet"),
    "stsb_lora": stsb_lora,
    "sick_prompts": sick_prompts,
    "retrieval_mined": retrieval_mined,
    **{f"sick_{loss}": grouped(loss) for loss in GROUPED},
    "cross_entailed_cosent": crossed("entailed", entailed, "cosent"),
    "cross_entailed_cross_entropy": crossed("entailed", entailed, "cross_entropy"),
    "cross_related_cosent": crossed("related", related, "cosent"),
    "cross_related_cross_entropy": crossed("related", related, "cross_entropy"),
    "cross_related_regression": crossed("related", related, "regression"),
}


def main():
    names = list(EXPERIMENTS) if sys.argv[1:] == ["all"] else sys.argv[1:]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        sys.exit(f"wanted experiments among: {', '.join(EXPERIMENTS)}, all")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            EXPERIMENTS[name](Path(folder))


if __name__ == "__main__":
    main()
