"""Metrics against their definitions, losses against their columns."""

import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
from fastsim.cli import main as cli
from fastsim.training import metrics
from fastsim.training.formats import format_of
from fastsim.training.objectives import LOSSES, Objective, check_loss, fitting
from tests.seeds import fresh

SCORED = format_of(["sentence1", "sentence2", "score"])
LABELLED = format_of(["sentence1", "sentence2", "label"])
PAIRS = format_of(["anchor", "positive"])
TRIPLETS = format_of(["anchor", "positive", "negative", "negative_2"])
TEXTS = format_of(["text", "label"])


def test_pair_correlations_against_pandas():
    import pandas

    u, v = torch.randn(2, 30, 6)
    gold = torch.randint(0, 5, (30,)).double()
    found = metrics.pair_correlations(u, v, gold.tolist())
    scores = {
        "cosine": [float(a @ b / (a.norm() * b.norm())) for a, b in zip(u, v, strict=True)],
        "dot": [float(a @ b) for a, b in zip(u, v, strict=True)],
        "euclidean": [-math.dist(a.tolist(), b.tolist()) for a, b in zip(u, v, strict=True)],
        "manhattan": [-float((a - b).abs().sum()) for a, b in zip(u, v, strict=True)],
    }
    for name, values in scores.items():
        frame = pandas.DataFrame({"s": values, "g": gold.numpy()})
        for kind in ("pearson", "spearman"):
            expected = frame.corr(kind)["s"]["g"]
            assert found[f"{kind}_{name}"] == pytest.approx(expected, abs=1e-5)


def test_correlation_of_constants_is_nan():
    for scores, gold in (([1.0, 2.0], [3.0, 3.0]), ([3.0, 3.0], [1.0, 2.0]), ([1.0], [2.0])):
        assert all(map(math.isnan, metrics.correlations(scores, gold).values()))


def test_binary_tries_every_threshold():
    generator = fresh(1)
    labels = torch.randint(0, 2, (40,), generator=generator).tolist()
    scores = (torch.randn(40, generator=generator) + torch.tensor(labels)).tolist()
    found = metrics.binary(scores, labels)
    best_accuracy, best_f1 = 0, 0
    for cut in [*scores, max(scores) + 1]:
        chosen = [score >= cut for score in scores]
        hits = sum(c and bool(label) for c, label in zip(chosen, labels, strict=True))
        right = sum(c == bool(label) for c, label in zip(chosen, labels, strict=True))
        best_accuracy = max(best_accuracy, right / 40)
        best_f1 = max(best_f1, 2 * hits / (sum(chosen) + sum(labels)))
    assert found["accuracy"] == pytest.approx(best_accuracy)
    assert found["f1"] == pytest.approx(best_f1)
    cut = found["accuracy_threshold"]
    right = sum((s >= cut) == bool(label) for s, label in zip(scores, labels, strict=True))
    assert right / 40 == pytest.approx(best_accuracy)
    chosen = [score >= found["f1_threshold"] for score in scores]
    hits = sum(c and bool(label) for c, label in zip(chosen, labels, strict=True))
    assert 2 * hits / (sum(chosen) + sum(labels)) == pytest.approx(best_f1)
    order = sorted(zip(scores, labels, strict=True), reverse=True)
    precisions = [
        sum(label for _, label in order[: i + 1]) / (i + 1)
        for i, (_, label) in enumerate(order)
        if label
    ]
    assert found["average_precision"] == pytest.approx(sum(precisions) / len(precisions))


def test_no_score_may_be_the_best_threshold():
    found = metrics.binary([3.0, 2.5, 2.0, 1.0], [0, 0, 0, 1])
    assert found["accuracy"] == 3 / 4
    assert 3.0 < found["accuracy_threshold"] < math.inf


def test_retrieval_by_hand():
    # query 0 finds its answers at ranks 1 and 3, query 1 (itself left out) at rank 2.
    corpus = torch.eye(4)
    queries = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 9]])
    found = metrics.retrieval(queries, corpus, [{0, 2}, {1}], left_out=[-1, 3])
    assert found["recall@1"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["recall@5"] == 1.0
    assert found["mrr@10"] == pytest.approx((1 + 1 / 2) / 2)
    first = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert found["ndcg@10"] == pytest.approx((first + 1 / math.log2(3)) / 2)


def test_more_answers_than_are_looked_at():
    """The best there can be are ten answers in the first ten places."""
    angles = torch.arange(14) * 0.05
    corpus = torch.stack([angles.cos(), angles.sin()], 1)
    found = metrics.retrieval(corpus[:1], corpus, [set(range(12))])
    assert found["ndcg@10"] == pytest.approx(1.0)
    assert found["recall@10"] == pytest.approx(10 / 12)


def test_what_is_left_out_makes_no_room():
    """The query is a row of the corpus, the nearest to itself; its answer is the tenth after it."""
    angles = torch.arange(14) * 0.05
    corpus = torch.stack([angles.cos(), angles.sin()], 1)
    found = metrics.retrieval(corpus[:1], corpus, [{10}], left_out=[0])
    assert found["recall@10"] == 1.0
    assert found["mrr@10"] == pytest.approx(1 / 10)


@pytest.mark.parametrize("left_out", [None, [13], [-1]])
def test_an_answer_beyond_the_tenth_place_is_none(left_out):
    """Also where a search looked one place further, for a row that was not near after all."""
    angles = torch.arange(14) * 0.05
    corpus = torch.stack([angles.cos(), angles.sin()], 1)
    for row, found in ((9, True), (10, False)):
        result = metrics.retrieval(corpus[:1], corpus, [{row}], left_out=left_out)
        assert result["recall@10"] == found
        assert result["mrr@10"] == found / 10
        assert result["ndcg@10"] == pytest.approx(found / math.log2(11))


def test_triplets_and_classes():
    a, p, n = torch.tensor([[1.0, 0]]), torch.tensor([[1.0, 0.1]]), torch.tensor([[0.0, 1]])
    assert set(metrics.triplets(a, p, n).values()) == {1.0}
    assert set(metrics.triplets(a, n, p).values()) == {0.0}
    # Embeddings that are all alike have learnt nothing.
    assert set(metrics.triplets(a, p, p).values()) == {0.0}
    logits = torch.tensor([[2.0, 1, 0], [0, 1, 0], [3, 1, 0], [0, 0, 1]])
    found = metrics.classes(logits, [0, 1, 1, 2])
    assert found["accuracy"] == pytest.approx(3 / 4)
    # One of two chosen is class 0; one of the two of class 1 is found.
    assert found["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


# ---- losses and columns ----


def test_fitting_is_the_table_of_the_documentation():
    assert fitting(PAIRS) == fitting(TRIPLETS)[:-1]
    readme = (Path(__file__).parents[2] / "fastsim/training/README.md").read_text()
    said = " ".join(inspect.getdoc(cli.train.callback).split())
    for columns, layout in {
        "sentence1, sentence2, score": SCORED,
        "anchor, positive[, negative, negative_2, ...]": TRIPLETS,
        "sentence1, sentence2, label": LABELLED,
        "text, label": TEXTS,
    }.items():
        names = ", ".join(fitting(layout))
        row = rf"^\| {layout.name} \| {re.escape(columns)} \| (.+?)(?: \(.+\))? \|$"
        line = re.search(row, readme, re.MULTILINE)
        assert line[1] == names
        assert f"{columns.replace(', negative_2', '')} {names} " in said


def test_a_loss_that_does_not_fit_names_those_that_do():
    with pytest.raises(
        ValueError,
        match=r"one of info_nce, decoupled_contrastive, full_triplet, siglip for .*, got 'cosent'",
    ):
        check_loss("cosent", PAIRS)
    with pytest.raises(ValueError, match="got 'cosend'; all losses: cosent, angle"):
        check_loss("cosend", SCORED)


LAYOUTS = [SCORED, LABELLED, PAIRS, TRIPLETS, TEXTS]
CASES = [(loss, layout) for layout in LAYOUTS for loss in fitting(layout)]


def labels_of(layout):
    """Labels of eight rows."""
    return {
        "scored pairs": torch.linspace(0, 1, 8),
        "labelled pairs": torch.arange(8) % 3,
        "labelled texts": torch.arange(8) // 2,
    }.get(layout.name)


@pytest.mark.parametrize(("loss", "layout"), CASES)
def test_every_loss_trains_on_its_columns(loss, layout):
    vectors = [torch.randn(8, 6, requires_grad=True) for _ in layout.texts]
    labels = labels_of(layout)
    learn = LOSSES[loss].learnable
    objective = Objective(loss, layout, learn=learn, dim=6, classes=("a", "b", "c"))
    value = objective(vectors, labels)
    value.backward()
    assert torch.isfinite(value)
    assert all(vector.grad.abs().sum() > 0 for vector in vectors)
    for name, parameter in objective.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(("loss", "layout"), CASES)
def test_every_number_of_a_loss_is_tried_out(loss, layout):
    """As it was given: what is learnt as a logarithm too. The run's random numbers stay."""
    learn, state = LOSSES[loss].learnable, torch.get_rng_state()
    more = {"learn": learn, "dim": 6, "classes": ("a", "b")}
    more["widths"] = () if loss == "classification" else (2, 4)
    Objective(loss, layout, **more).try_out(layout, dim=6)
    if loss != "classification":
        assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in inspect.signature(LOSSES[loss].module).parameters.items():
        if loss != "classification" and type(parameter.default) is float:
            objective = Objective(loss, layout, options={name: math.nan}, **more)
            with pytest.raises(ValueError, match=f"{loss}: {name}: wanted a .*, got nan"):
                objective.try_out(layout, dim=6)


@pytest.mark.parametrize(("loss", "layout"), [c for c in CASES if c[0] != "classification"])
def test_widths_are_a_sum_over_prefixes(loss, layout):
    vectors = [torch.randn(8, 6, dtype=torch.float64, requires_grad=True) for _ in layout.texts]
    labels, widths = labels_of(layout), (2, 6, 4)
    learn = LOSSES[loss].learnable
    results = []
    for given in (widths, ()):
        objective = Objective(loss, layout, learn=learn, widths=given)
        parts = [vectors] if given else [[v[:, :width] for v in vectors] for width in widths]
        value = sum(objective(part, labels) for part in parts)
        wanted = [*vectors, *objective.parameters()]
        results.append((value, *torch.autograd.grad(value, wanted)))
    for found, summed in zip(*results, strict=True):
        torch.testing.assert_close(found, summed)


def test_labelled_texts_are_the_target_matrix():
    vectors, groups = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    wanted = torch.tensor([[1.0 if a == b else -1.0 for b in groups] for a in groups])
    found = Objective("matrix_mse", TEXTS)([vectors], groups)
    torch.testing.assert_close(found, ((unit @ unit.T - wanted) ** 2).mean())


def test_learnt_options_start_at_their_value_and_stay_positive():
    objective = Objective("siglip", PAIRS, options={"scale": 5.0}, learn=("scale", "bias"))
    assert objective.values() == pytest.approx({"scale": 5.0, "bias": -10.0})
    with torch.no_grad():
        objective.learnt["scale"].sub_(100)
    assert objective.values()["scale"] > 0
    with pytest.raises(ValueError, match="learn: wanted nothing for full_triplet, got 'margin'"):
        Objective("full_triplet", PAIRS, learn=("margin",))
    with pytest.raises(ValueError, match=r"reduction: wanted 'mean' in several .*, got 'sum'"):
        Objective("triplet_margin", TRIPLETS, options={"reduction": "sum"}, group=object())
    with pytest.raises(ValueError, match=r"loss_options: .* of info_nce .*, got tempura"):
        Objective("info_nce", PAIRS, options={"tempurature": 1.0})
    labelled = format_of(["sentence1", "sentence2", "label"])
    with pytest.raises(ValueError, match=r"matryoshka: .* classification \(got widths \(4, 2\)"):
        Objective("classification", labelled, widths=(4, 2))
    with pytest.raises(ValueError, match="loss_options: wanted none for classification, got scale"):
        Objective("classification", labelled, options={"scale": 1.0})


@pytest.mark.parametrize("loss", [name for name, spec in LOSSES.items() if spec.learnable])
def test_learnt_options_have_a_gradient(loss):
    """Every one that the loss can learn: that of the option itself, or of its logarithm."""
    layout = next(layout for layout in (SCORED, PAIRS, TEXTS) if layout.name in LOSSES[loss].apply)
    objective = Objective(loss, layout, learn=LOSSES[loss].learnable)
    vectors = list(torch.randn(len(layout.texts), 6, 4))
    labels = {"score": torch.linspace(0, 1, 6), "label": torch.arange(6) // 2}.get(layout.label)
    objective(vectors, labels).backward()
    assert objective.learnt.keys() == set(LOSSES[loss].learnable)
    assert all(bool(option.grad) for option in objective.learnt.values())


def test_a_flag_is_no_number_of_a_loss_nor_a_number_a_flag():
    """Although in Python it is an int."""
    with pytest.raises(ValueError, match="loss_options: temperature: wanted a number, got True"):
        Objective("info_nce", PAIRS, options={"temperature": True})
    with pytest.raises(ValueError, match="loss_options: symmetric: wanted true or false, got 1"):
        Objective("info_nce", PAIRS, options={"symmetric": 1})


def test_hard_negatives_are_candidates():
    vectors = list(torch.randn(4, 5, 6))
    found = Objective("info_nce", TRIPLETS)(vectors)
    unit = [part / part.norm(dim=1, keepdim=True) for part in vectors]
    logits = unit[0] @ torch.cat(unit[1:]).T / 0.05
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(5))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    margins = [
        torch.relu((vectors[0] - vectors[1]).norm(dim=1) - (vectors[0] - n).norm(dim=1) + 1).mean()
        for n in vectors[2:]
    ]
    found = Objective("triplet_margin", TRIPLETS)(vectors)
    torch.testing.assert_close(found, sum(margins) / 2)


def test_every_loss_of_the_table_has_a_case():
    assert {loss for loss, _ in CASES} == set(LOSSES)
    assert len(set(itertools.chain(CASES))) == len(CASES)
