"""Training on two processes is training on one; micro-batches change nothing."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import transformers
from packaging.version import Version

from fastsim.encoders.encoder import Encoder
from fastsim.training import demo
from fastsim.training.run import Options, train
from fastsim.training.trainer import Trainer
from tests import models
from tests.distributed import sharded
from tests.training.pictures import leave_empty
from tests.training.processes import run_together
from tests.training.runs import stopped

KEPT, HELD = demo.situations()
TUPLES = [{"anchor": one, "positive": same, "negative": other} for one, same, other, _ in KEPT[:20]]
SCORED = [
    {"sentence1": one, "sentence2": same, "score": number / 9}
    for number, (one, same, *_) in enumerate(KEPT[:10])
]
LABELLED = [
    {"text": text, "label": number}
    for number, (one, same, other, too) in enumerate(KEPT[:8])
    for text in (one, same, too)
]
# name -> (rows, loss, further options)
RUNS = {
    "info_nce": (TUPLES, "info_nce", {"learn": ("temperature",), "batch_size": 8}),
    "micro-batches": (
        TUPLES,
        "info_nce",
        {"learn": ("temperature",), "batch_size": 8, "micro_batch_size": 3},
    ),
    "regression": (None, "cosine_regression", {"batch_size": 7}),
    "cosent": (None, "cosent", {"batch_size": 7, "accumulate": 2, "micro_batch_size": 2}),
    "cross": (None, "regression", {"batch_size": 7, "architecture": "cross-encoder"}),
    # The second batch has one row, which is no negative of itself on the other process.
    "a row over": (TUPLES, "siglip", {"learn": ("scale", "bias"), "batch_size": 19}),
    "a row over, micro-batches": (
        TUPLES,
        "info_nce",
        {"learn": ("temperature",), "batch_size": 19, "micro_batch_size": 4},
    ),
    "a row over, single rows": (SCORED, "cosine_regression", {"batch_size": 9}),
    "a row over, scored": (SCORED, "cosent", {"learn": ("scale",), "batch_size": 9}),
    "a row over, cross": (
        SCORED,
        "regression",
        {"batch_size": 9, "architecture": "cross-encoder"},
    ),
    **{
        loss: (LABELLED, loss, {"batch_size": 12, "micro_batch_size": 4, **more})
        for loss, more in {
            "nt_xent": {"learn": ("temperature",)},
            "multi_similarity": {},
            "batch_hard_triplet": {"loss_options": {"distance": "cosine", "soft": True}},
        }.items()
    },
}

# How accelerate's configuration reaches a process that `accelerate launch` starts.
SHARDED = {
    "fsdp": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    },
    "deepspeed": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "DS_ACCELERATOR": "cpu",
    },
}
# Runs of them: with a learnt temperature and the best of several evaluations, and accumulating.
OF_SHARDED = ("micro-batches", "cosent")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The tiny BERT without dropout: two processes draw other numbers than one."""
    import shutil

    folder = tmp_path_factory.mktemp("calm") / "bert"
    shutil.copytree(models.tiny_bert(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def trained(calm, tmp_path_factory):
    """Folder of every run: by one process, by two, and by one without micro-batches."""
    folder = tmp_path_factory.mktemp("runs")
    files = {}
    for number, rows in enumerate((TUPLES, LABELLED, SCORED)):
        files[id(rows)] = folder / f"{number}.jsonl"
        files[id(rows)].write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = demo.write_pairs(KEPT[:12], folder / "scored.jsonl")

    def options(name, kind, **changes):
        rows, loss, more = RUNS[name]
        return {
            "model": str(calm),
            "train": str(files[id(rows)] if rows else scored),
            "loss": loss,
            "output": str(folder / kind / name),
            "learning_rate": 1e-3,
            "max_length": 32,
            "max_steps": 7,
            "progress": False,
            "cpu": True,
            **more,
            **changes,
        }

    (folder / "one").mkdir()
    (folder / "whole").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        leave_empty(patch.setattr)
        for name in RUNS:
            train(Options(**options(name, "one")))
            if "micro_batch_size" in RUNS[name][2]:
                train(Options(**options(name, "whole", micro_batch_size=None)))
    (folder / "two").mkdir()
    run_together(folder / "two", train_all, [options(name, "two") for name in RUNS], False)
    return folder, options


@pytest.fixture(scope="module", params=SHARDED)
def in_shards(request, trained):
    """Folder of the runs by one process and by two that share the weights."""
    if request.param == "deepspeed":
        pytest.importorskip("deepspeed")
    folder, options = trained
    place = folder / request.param
    place.mkdir()
    asked = [options(name, request.param) for name in OF_SHARDED]
    asked[0] |= {"eval": asked[0]["train"], "eval_steps": 7}
    run_together(place, train_all, asked, True, environment=SHARDED[request.param])
    return folder, request.param


def train_all(options, shards):
    """What each process does: it trains by these options, one after the other."""
    warnings.simplefilter("ignore")
    leave_empty()
    if shards:
        sharded.on_cpus()
    for each in options:
        train(Options(**each))
    assert torch.distributed.get_world_size() == 2


def train_in_parts(options, step):
    """What each process does: it trains, and again with a break after this step."""
    warnings.simplefilter("ignore")
    leave_empty()
    for each in options:
        train(Options(**each))
        asked = Options(**each | {"output": each["output"] + " in parts"})
        stopped(asked, step)
        train(asked)


def parameters(folder):
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    files = [file for file in files if "checkpoints" not in file.parts]
    assert files
    return {(file.name, key): value for file in files for key, value in load_file(file).items()}


def assert_same(one, two, start):
    assert one.keys() == two.keys()
    for key, value in one.items():
        if "key.bias" in key[1]:
            continue  # its gradient is 0 but for rounding, which AdamW makes steps of
        moved = (value - start.get(key, 0)).abs().mean().item()
        apart = (value - two[key]).abs().mean().item()
        assert apart <= 1e-3 * moved + 1e-6, key


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_the_model_of_one(name, trained, calm):
    folder, _ = trained
    start = parameters(calm)
    one, two = (parameters(folder / kind / name) for kind in ("one", "two"))
    assert_same(one, two, start)
    history = [
        json.loads((folder / kind / name / "fastsim_training.json").read_text())["history"]
        for kind in ("one", "two")
    ]
    losses = [[e["loss"] for e in entries if "loss" in e] for entries in history]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    means = [entries[-1]["train_loss"] for entries in history]
    assert means[0] == pytest.approx(means[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", [n for n, run in RUNS.items() if "micro_batch_size" in run[2]])
def test_micro_batches_train_the_same_model(name, trained, calm):
    folder, _ = trained
    one, whole = (parameters(folder / kind / name) for kind in ("one", "whole"))
    assert_same(one, whole, parameters(calm))


@pytest.mark.parametrize("name", OF_SHARDED)
def test_processes_that_share_the_weights_train_the_model_of_one(name, in_shards, calm):
    """By accelerate's configuration, FSDP2 and ZeRO-2; what is written and evaluated is whole."""
    folder, kind = in_shards
    one, two = (parameters(folder / place / name) for place in ("one", kind))
    assert_same(one, two, parameters(calm))
    about = json.loads((folder / kind / name / "fastsim_training.json").read_text())
    first = json.loads((folder / "one" / name / "fastsim_training.json").read_text())
    assert about["loss_values"] == pytest.approx(first["loss_values"], rel=1e-4)
    losses = [[e["loss"] for e in found["history"] if "loss" in e] for found in (first, about)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    if name == OF_SHARDED[0]:  # of the one checkpoint
        encoder = Encoder.from_pretrained(folder / kind / name)
        vectors = [encoder.encode([row[part] for row in TUPLES]) for part in TUPLES[0]]
        anchors, *others = (torch.nn.functional.normalize(v, dim=1) for v in vectors)
        scores = [(anchors * other).sum(1) for other in others]
        right = (scores[0] > scores[1]).double().mean().item()
        assert about["after"]["triplet_accuracy_cosine"] == pytest.approx(right, abs=0.051)
        assert (
            about["after"]["triplet_accuracy_cosine"] > about["before"]["triplet_accuracy_cosine"]
        )


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"),
    reason="transformers reads an optimizer's state on several CPU processes only since 5.19",
)
def test_two_processes_go_on_within_a_later_epoch(trained):
    """Where batches are dealt, and where rows are shuffled: the end is that of an unbroken run."""
    folder, options = trained
    (folder / "breaks").mkdir()
    names = ("info_nce", "cosent")
    asked = [options(name, "breaks", max_steps=12) for name in names]
    run_together(folder / "breaks", train_in_parts, asked, 11)
    for name in names:
        one, two = (folder / "breaks" / each for each in (name, f"{name} in parts"))
        history = json.loads((two / "fastsim_training.json").read_text())["history"]
        epochs = history[-1]["epoch"] * 11 / 12
        assert epochs > 1
        assert abs(epochs - round(epochs)) > 0.1
        one, two = parameters(one), parameters(two)
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_two_processes_leave_a_model_that_encodes(trained):
    vectors = Encoder.from_pretrained(trained[0] / "two" / "info_nce").encode(models.texts(6))
    assert vectors.isfinite().all()
    assert torch.linalg.matrix_rank(vectors) == 6


def test_duplicates_are_excluded(tmp_path, calm, monkeypatch):
    """Equal candidates share a batch and are nobody's negative."""
    from fastsim.training.objectives import Objective

    rows = [{"anchor": row["anchor"], "positive": KEPT[i // 5][1]} for i, row in enumerate(TUPLES)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []
    forward = Objective.forward

    def record(self, vectors, labels=None, exclude=None):
        seen.append((vectors[1].detach(), *exclude))
        return forward(self, vectors, labels, exclude)

    monkeypatch.setattr(Objective, "forward", record)
    settings = {"model": str(calm), "train": str(file), "loss": "info_nce", "progress": False}
    settings |= {"batch_size": 20, "max_steps": 1, "cpu": True, "output": str(tmp_path / "out")}
    train(Options(**settings))
    ((vectors, row_ids, column_ids),) = seen
    assert len(vectors) == 20  # a positive is there five times
    assert torch.equal(row_ids, column_ids)
    assert len(row_ids.unique()) == 4
    same = (vectors[:, None] - vectors[None]).abs().amax(2) < 1e-5
    assert torch.equal(same, row_ids[:, None] == column_ids[None, :])


def test_the_first_version_of_fsdp_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    settings = {"model": "none", "train": "none", "loss": "info_nce", "output": str(tmp_path)}
    with pytest.raises(ValueError, match=r"FSDP_VERSION: wanted 2 .* got 1"):
        train(Options(**settings))


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_writes_the_weights(first):
    """The others have an empty state, which would take the place of the whole one."""
    written = []
    trainer = SimpleNamespace(
        is_sharded=True,
        model_wrapped=None,
        accelerator=SimpleNamespace(get_state_dict=lambda model: {"w": 1} if first else {}),
        args=SimpleNamespace(should_save=first),
        _save=lambda folder, state_dict: written.append(state_dict),
    )
    Trainer.save_model(trainer, "folder")
    assert written == ([{"w": 1}] if first else [])
