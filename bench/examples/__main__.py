"""python -m bench.examples FOLDER: example scripts of sentence-transformers, with our losses.

FOLDER is the `examples` folder of a checkout. Every script that imports losses which have a drop-in
runs a few steps twice from one seed: as it is, and with the import changed, each in a process of
its own. Models, data sets and files are stand-ins (bench/examples/stand_ins.py); batches are small,
mixed precision is that of a processor: none, or bfloat16 where a script asks for it. Writes the
losses that the trainer sees at every step to bench/results/<device>/examples.jsonl.
"""

import contextlib
import os
import random
import re
import sys
import warnings
from pathlib import Path

import click

from bench.forks import forked
from bench.results import read, write

STEPS, BATCH, LONGEST = 4, 8, 60  # steps of a script, rows of a batch, seconds
FEW = 2  # layers of a model
# Layers, width and heads of the model of a script that takes some of many layers or dimensions,
# and its rows of a batch.
SIZES = {
    "model_distillation_layer_reduction": (12, 768, 12, BATCH),
    "sentence_transformer/training/multimodal": (1, 2048, 16, 2),
}
PACKAGES = {
    "sentence_transformers.sentence_transformer.losses": (
        "fastsim.integrations.sentence_transformers"
    ),
    "sentence_transformers.multi_vector_encoder.losses": (
        "fastsim.integrations.sentence_transformers.multi_vector"
    ),
}
IMPORT = re.compile(rf"^from ({'|'.join(map(re.escape, PACKAGES))}) import", re.MULTILINE)
FALLBACK = re.compile(r"(\w+): (.*) has no fused form")


class DoneError(BaseException):
    """A script has trained; what it does then is no part of its losses."""


def swapped(text):
    """A script with its import of losses changed, and nothing else."""
    return IMPORT.sub(lambda found: f"from {PACKAGES[found[1]]} import", text)


def scripts(folder):
    return sorted(path for path in Path(folder).rglob("*.py") if IMPORT.search(path.read_text()))


# ---- in a process of its own ----


def settings(kind, batch, mixed):
    """Let training arguments be short, small and silent."""
    original = kind.__init__

    def init(self, *given, **options):
        for name in ("eval_strategy", "save_strategy"):
            options[name] = "no"
        options |= {"max_steps": STEPS, "per_device_train_batch_size": batch, "use_cpu": True}
        options |= {"fp16": False, "bf16": mixed and options.get("bf16", False)}
        options |= {"load_best_model_at_end": False, "disable_tqdm": True, "report_to": []}
        options |= {"dataloader_pin_memory": False, "logging_strategy": "no"}
        original(self, *given, **options)

    kind.__init__ = init


def trainers(seen):
    """Note every loss, and end a script after it trained bi-encoders once."""
    from sentence_transformers import CrossEncoderTrainer
    from sentence_transformers.base.trainer import BaseTrainer

    train, compute = BaseTrainer.train, BaseTrainer.compute_loss

    def compute_loss(self, *given, **options):
        found = compute(self, *given, **options)
        value = found[0] if isinstance(found, tuple) else found
        if not isinstance(self, CrossEncoderTrainer):
            seen["losses"].append(float(value))
            seen["dtype"] = str(value.dtype).removeprefix("torch.")
        return found

    def trained(self, *given, **options):
        found = train(self, *given, **options)
        if isinstance(self, CrossEncoderTrainer):
            return found
        held = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        kinds = {type(part) for loss in held for part in loss.modules()}
        seen["classes"] = sorted(kind.__name__ for kind in kinds if is_ours(kind))
        raise DoneError

    BaseTrainer.compute_loss, BaseTrainer.train = compute_loss, trained
    BaseTrainer.hyperparameter_search = lambda self, **options: self.train()


def is_ours(kind):
    """Whether a class, or one that it is a subclass of, is of fastsim."""
    return any(base.__module__.startswith("fastsim.") for base in kind.__mro__)


def run(path, ours, mixed):
    """What a script's trainer sees: losses, their dtype, our classes and what has no fused form."""
    import numpy
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
    from sentence_transformers.base.training_args import BaseTrainingArguments

    from bench.examples import stand_ins

    layers, batch, seen = FEW, BATCH, {"losses": []}
    for script, sizes in SIZES.items():
        if script in str(path):
            layers, stand_ins.WIDTH, stand_ins.HEADS, batch = sizes
    stand_ins.files()
    stand_ins.small_data()
    stand_ins.no_evaluation()
    stand_ins.packages()
    stand_ins.absent()
    for kind in (SentenceTransformer, CrossEncoder, MultiVectorEncoder):
        stand_ins.named(kind, layers)
    stand_ins.named_parts(layers)
    stand_ins.pictures()
    for kind in (BaseTrainingArguments, *every_subclass(BaseTrainingArguments)):
        if "__init__" in vars(kind):
            settings(kind, batch, mixed)
    trainers(seen)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    text, sys.argv = path.read_text(), [str(path)]
    if "path/to/sentences" in text:
        sys.argv.append("sentences.txt")
    code = compile(swapped(text) if ours else text, str(path), "exec")
    with warnings.catch_warnings(record=True) as said, contextlib.suppress(DoneError):
        warnings.simplefilter("always")
        exec(code, {"__name__": "__main__", "__file__": str(path)})
    if "classes" not in seen:
        raise RuntimeError("nothing was trained")
    found = (FALLBACK.search(str(each.message)) for each in said)
    seen["not fused"] = sorted({f"{each[1]}: {each[2]}" for each in found if each})
    return seen


def every_subclass(kind):
    for each in kind.__subclasses__():
        yield each
        yield from every_subclass(each)


# ---- all of them ----


def compared(path, mixed):
    """What both runs of a script saw, and by how much their losses differ at most."""
    log = os.environ.get("EXAMPLES_LOG", os.devnull)
    theirs, ours = (
        forked(run, path, which, mixed, seconds=LONGEST, log=log) for which in (False, True)
    )
    for name, seen in (("as it is", theirs), ("with ours", ours)):
        if "not measured" in seen:
            return {"not measured": f"{name}: {seen['not measured']}"}
    pairs = list(zip(theirs["losses"], ours["losses"], strict=True))
    found = {"dtypes": [theirs["dtype"], ours["dtype"]], "by": ours["classes"]}
    found |= {"not fused": ours["not fused"], "theirs": theirs["losses"], "ours": ours["losses"]}
    return found | {"worst": max(abs(a - b) / (1 + abs(a)) for a, b in pairs)}


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="scripts whose path has this")
@click.option("--mixed/--no-mixed", default=True, help="in bfloat16 too, where a script asks")
@click.option("--resume", is_flag=True, help="go on where a run was broken off")
@click.option("--out", default="examples", show_default=True, help="name of the result file")
def main(folder, only, mixed, resume, out):
    """Run, print and write."""
    import sentence_transformers  # noqa: F401  (before the forks, once for all)
    import torch

    from bench.examples import stand_ins
    from fastsim.benchmark.results import environment
    from fastsim.integrations.sentence_transformers import multi_vector  # noqa: F401

    folder, about, rows = folder.resolve(), environment("cpu", {"steps": STEPS, "rows": BATCH}), []
    torch.set_num_threads(1)
    if resume and (before := read(out, about["device"])):
        rows = before[1]
    for modern in (False, True):
        stand_ins.folder(FEW, modern=modern)
    known = {(row["script"], row["mixed"]) for row in rows}
    for path in scripts(folder):
        asked = mixed and re.search(r"\bbf16=True", path.read_text()) is not None
        for precision in ("none", "bfloat16") if asked else ("none",):
            script = str(path.relative_to(folder))
            if only not in script or (script, precision) in known:
                continue
            row = {"script": script, "mixed": precision} | compared(path, precision != "none")
            said = row.get("not measured") or f"{row['worst']:.1e} {row['by']} {row['not fused']}"
            click.echo(f"{script}, mixed precision {precision}: {said}")
            rows.append(row)
            write(out, rows, about)


if __name__ == "__main__":
    main()
