"""Drop-in losses of sentence-transformers: its trainer, its wrappers, several devices."""

import copy
import functools
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.models import texts, tiny_bert
from tests.rendezvous import rendezvous

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import transformers
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from fastsim.integrations import sentence_transformers as ours
from fastsim.integrations.transformers import log_metrics

pytestmark = pytest.mark.filterwarnings("default")  # those of the trainer's own libraries


@functools.cache
def kept_model():
    transformer = Transformer(str(tiny_bert()))
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def model():
    return copy.deepcopy(kept_model())


SENTENCES = texts(40)
ANCHORS, POSITIVES, NEGATIVES = SENTENCES[:24], SENTENCES[1:25], SENTENCES[10:34]
COLUMNS = {
    "pairs": {"anchor": ANCHORS, "positive": POSITIVES},
    "triplets": {"anchor": ANCHORS, "positive": POSITIVES, "negative": NEGATIVES},
    "scores": {"a": ANCHORS, "b": POSITIVES, "score": [i % 7 / 7 for i in range(24)]},
    "classes": {"a": ANCHORS, "b": POSITIVES, "label": [i % 3 for i in range(24)]},
    "texts": {"text": ANCHORS},
    "one": {"text": ANCHORS, "label": [i % 3 for i in range(24)]},
}
GTE = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
CASES = [
    ("MultipleNegativesRankingLoss", {}, "pairs"),
    ("MultipleNegativesRankingLoss", GTE, "triplets"),
    ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3}, "triplets"),
    ("GISTEmbedLoss", {}, "triplets"),
    ("CachedGISTEmbedLoss", {"mini_batch_size": 3}, "pairs"),
    ("CoSENTLoss", {}, "scores"),
    ("AnglELoss", {}, "scores"),
    ("AnglELoss", {}, "triplets"),
    ("MegaBatchMarginLoss", {"mini_batch_size": 3}, "pairs"),
    ("MegaBatchMarginLoss", {"use_mini_batched_version": False}, "pairs"),
    ("CosineSimilarityLoss", {}, "scores"),
    ("SoftmaxLoss", {"embedding_dimension": 32, "num_labels": 3}, "classes"),
    ("TripletLoss", {}, "triplets"),
    ("BatchHardTripletLoss", {}, "one"),
    ("BatchHardSoftMarginTripletLoss", {}, "one"),
    ("BatchSemiHardTripletLoss", {}, "one"),
    ("BatchAllTripletLoss", {}, "one"),
    ("ContrastiveTensionLossInBatchNegatives", {}, "texts"),
    ("GlobalOrthogonalRegularizationLoss", {}, "pairs"),
]
NO_MATRYOSHKA = {
    "SoftmaxLoss": "its classifier has one width, which Matryoshka changes",
    "ContrastiveTensionLossInBatchNegatives": "one of its encoders is a copy that is not cut",
    "GlobalOrthogonalRegularizationLoss": "MatryoshkaLoss takes no dict of losses",
}


def make(package, name, options, encoder):
    torch.manual_seed(0)  # of a loss's own weights
    guide = {"guide": kept_model()} if "GIST" in name else {}
    return getattr(package, name)(encoder, **guide, **options)


def train(loss, encoder, columns, folder, prepare=None, **options):
    """The losses of the steps."""
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        seed=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    several = any(isinstance(column, Dataset) for column in columns.values())
    rows = columns if several else Dataset.from_dict(columns)
    trainer = SentenceTransformerTrainer(
        model=encoder, args=arguments, train_dataset=rows, loss=loss
    )
    if prepare is not None:
        prepare(trainer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(("name", "options", "columns"), CASES)
def test_same_training(name, options, columns, tmp_path):
    """Ours and theirs from one seed: the same curve, within the rounding of what is logged."""
    curves, weights = [], []
    for package in (ours, theirs):
        encoder = model()
        loss = make(package, name, options, encoder)
        curves.append(train(loss, encoder, COLUMNS[columns], tmp_path))
        weights.append(encoder[0].model.embeddings.word_embeddings.weight)
    assert len(curves[0]) == 3
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "options", "columns"), CASES)
def test_under_matryoshka(name, options, columns):
    encoder = model()
    encoder.eval()  # dropout would differ from call to call
    sides = [column for key, column in COLUMNS[columns].items() if key not in ("label", "score")]
    labels = COLUMNS[columns].get("label") or COLUMNS[columns].get("score")
    labels = None if labels is None else torch.tensor(labels)
    if name in NO_MATRYOSHKA:
        pytest.skip(f"{NO_MATRYOSHKA[name]}; theirs too")
    results = []
    for package in (ours, theirs):
        loss = make(package, name, options, encoder)
        wrapped = theirs.MatryoshkaLoss(encoder, loss, [32, 16, 8], [1.0, 0.5, 0.25])
        encoder.zero_grad()
        value = wrapped([dict(encoder.preprocess(side)) for side in sides], labels)
        value.backward()
        grads = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
        results.append([value.detach(), *grads])
    largest = max(grad.abs().max().item() for grad in results[1][1:])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5 * largest)


def test_metrics_are_logged(tmp_path):
    """Beside the loss, which stays what it is; every reporter is told."""
    told, curves = [], []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            told.append({name for name in logs if name.startswith("batch_")})

    def prepare(trainer):
        trainer.add_callback(Reporter())
        log_metrics(trainer)

    for way in (prepare, None):
        encoder = model()
        loss = ours.MultipleNegativesRankingLoss(encoder)
        curves.append(train(loss, encoder, COLUMNS["triplets"], tmp_path, way))
    assert curves[0] == curves[1]
    names = {"accuracy", "positive", "negative", "hardest_negative", "alignment", "uniformity"}
    names |= {"excluded_by_id", "excluded_by_score"}
    assert told == [{f"batch_{name}" for name in names}] * 3 + [set()]  # the last: the run's


def test_learnt_numbers_in_the_trainer(tmp_path):
    """A rate of its own, and the loss is trained with the model."""
    cases = [
        (ours.MultipleNegativesRankingLoss, {"scale": 20.0}),
        (ours.CachedMultipleNegativesRankingLoss, {"scale": 20.0}),
        (ours.SigLIPLoss, {"scale": 10.0, "bias": -10.0}),
    ]
    for kind, numbers in cases:
        encoder = model()
        learnt = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in numbers.items()}
        loss = kind(encoder, **learnt)
        train(
            loss,
            encoder,
            COLUMNS["pairs"],
            tmp_path,
            learning_rate_mapping={r"(^|\.)(scale|bias)$": 0.1},
        )
        for name, start in numbers.items():
            assert 0.05 < abs(learnt[name].item() - start) < 1


def test_learnt_scale_in_a_cached_loss_under_matryoshka_is_refused():
    scale = torch.nn.Parameter(torch.tensor(20.0))
    loss = ours.CachedMultipleNegativesRankingLoss(kept_model(), scale=scale)
    wrapped = theirs.MatryoshkaLoss(kept_model(), loss, [32, 16])
    batch = [dict(kept_model().preprocess(side)) for side in (ANCHORS, POSITIVES)]
    with pytest.raises(ValueError, match="scale: wanted a number under MatryoshkaLoss"):
        wrapped(batch, None)


@pytest.mark.parametrize("name", ["FullTripletLoss", "SigLIPLoss", "CoSENTMatrixLoss"])
def test_losses_of_ours_train(name, tmp_path):
    sets = ("triplets",) if name == "FullTripletLoss" else ("triplets", "one")
    for columns in sets:
        encoder = model()
        loss = theirs.MatryoshkaLoss(encoder, getattr(ours, name)(encoder), [32, 16])
        curve = train(loss, encoder, COLUMNS[columns], tmp_path)
        assert torch.tensor(curve).isfinite().all()


# ---- several devices ----

PROCESS = """
    import itertools, os, sys, warnings
    import torch, torch.distributed as dist

    warnings.simplefilter("ignore")
    from tests.integrations import test_sentence_transformers_training as training
    from tests.integrations.sentence_transformers_peer import DIRECTIONS, HARDNESS
    from tests.integrations.sentence_transformers_peer import Given, Guided, padded
    from fastsim.integrations import sentence_transformers as ours
    from sentence_transformers.sentence_transformer import losses as theirs

    rank, path = int(sys.argv[1]), sys.argv[2]
    training.kept_model()  # of several processes the first alone would write its files
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)

    def result(package, name, options, columns, guides=None):
        guide = () if guides is None else (Guided(),)
        loss = getattr(package, name)(Given(), *guide, gather_across_devices=True, **options)
        leaves = [c.clone().requires_grad_() for c in columns]
        batch = padded(leaves)
        if guides is not None:
            batch = [f | {"guide": g} for f, g in zip(batch, guides)]
        value = loss(batch, None)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves)]

    def same(name, options, columns, guides=None):
        results = [result(p, name, options, columns, guides) for p in (ours, theirs)]
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)

    torch.manual_seed(rank)
    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        for directions, hardness in zip(DIRECTIONS[::2], itertools.cycle(HARDNESS)):
            options = {"directions": directions, "hardness_mode": hardness}
            options["hardness_strength"] = 5.0 if hardness else 0.0
            same(name, options, [torch.randn(7, 6) for _ in range(3)])
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        same(name, both, [torch.randn(7, 6) for _ in range(2)])
    for name in ("GISTEmbedLoss", "CachedGISTEmbedLoss"):
        columns, guides = ([torch.randn(7, 6) for _ in range(3)] for _ in range(2))
        same(name, {"temperature": 0.2}, columns, guides)

    # Their trainer with several data sets and a loss for each, under DistributedDataParallel.
    results = [training.several_sets(package, path) for package in (theirs, ours)]
    (curve, weights), (other_curve, other_weights) = results
    assert len(curve) >= 4
    torch.testing.assert_close(other_curve, curve, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-4)
    # Both processes have the same weights at the end.
    everyone = [torch.empty_like(other_weights) for _ in range(2)]
    dist.all_gather(everyone, other_weights)
    assert torch.equal(*everyone)
    dist.destroy_process_group()
"""
# Without gather_across_devices: at a step the processes may train on different sets.
SETS = {
    "pairs": ("MultipleNegativesRankingLoss", {}),
    "triplets": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3}),
    "scores": ("CoSENTLoss", {}),
}


def several_sets(package, folder):
    """(losses of the steps, weights) of the multi-data-set trainer with the losses of a package."""
    encoder = model()
    loss = {key: make(package, *named, encoder) for key, named in SETS.items()}
    sets = {key: Dataset.from_dict(COLUMNS[key]) for key in SETS}
    curve = train(loss, encoder, sets, f"{folder}-out")
    return torch.tensor(curve), encoder[0].model.embeddings.word_embeddings.weight.detach()


def test_gathered_across_devices(tmp_path):
    """Two processes: value and gradients as theirs, whose candidates come from both, and training
    on several data sets at once.
    """
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    running = []
    with rendezvous(2) as common:
        for rank in range(2):
            place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            arguments = [*command, str(rank), str(tmp_path / "store")]
            environment = os.environ | place
            running.append(
                subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
            )
        errors = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)[-4000:]
