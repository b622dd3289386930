"""Evaluation by columns, with embeddings by hand."""

import math

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
from datasets import Dataset

from fastsim.encoders.names import ModelError
from fastsim.losses import SoftmaxClassification
from fastsim.training.evaluation import (
    as_binary,
    check_evaluation,
    check_vectors,
    evaluate_cross_encoder,
    evaluate_encoder,
    is_binary,
    metric_names,
    primary_metric,
)
from fastsim.training.formats import format_of
from tests.training.angles import Angles, Points


def evaluated(columns, **prompts):
    encoder = Angles(**prompts)
    found = evaluate_encoder(encoder, Dataset.from_dict(columns), format_of(list(columns)))
    return found, encoder


def test_each_column_is_encoded_with_its_prompt():
    columns = {"anchor": ["0", "40"], "positive": ["10", "0"]}
    found, encoder = evaluated(columns, anchor="5", positive="1")
    assert sorted(encoder.asked) == [("1", "0"), ("1", "10"), ("5", "0"), ("5", "40")]
    # The first anchor, at 5 degrees, has its positive at 11; its own text, at 1, is no answer. The
    # second, at 45, has the other's positive at 11 before its own at 1.
    assert found["recall@1"] == 1 / 2
    assert found["mrr@10"] == (1 + 1 / 2) / 2


def test_triplets_are_judged_by_all_their_negatives():
    columns = {"anchor": ["0", "90"], "positive": ["10", "100"]}
    columns |= {"negative": ["20", "91"], "negative_2": ["5", "92"], "negative_3": ["30", "91"]}
    found, _ = evaluated(columns)
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        assert found[f"triplet_accuracy_{name}"] == pytest.approx((1 / 2 + 0 + 1 / 2) / 3)


def test_a_labelled_text_finds_the_others_of_its_label():
    """Itself and copies of its row aside; a text with no company is no query."""
    texts = ["0", "10", "10", "12", "50", "100"]
    labels = ["a", "a", "a", "b", "b", "c"]
    found, _ = evaluated({"text": texts, "label": labels})
    # Nearest first: 0 has 10 and 12, 10 has 12 and 0, 12 has 10, 0 and 50, 50 has 12.
    ranks = [1, 2, 3, 1]
    assert found["mrr@10"] == pytest.approx(sum(1 / rank for rank in ranks) / 4)
    assert found["recall@1"] == 2 / 4
    gains = [1 / math.log2(rank + 1) for rank in ranks]
    assert found["ndcg@10"] == pytest.approx(sum(gains) / 4)


PAIRS = {"sentence1": ["0", "0", "9"], "sentence2": ["0", "10", "90"]}
TUPLES = {"anchor": ["0", "40"], "positive": ["10", "0"]}


@pytest.mark.parametrize(
    "columns",
    [
        PAIRS | {"score": [1.0, 0.5, 0.0]},
        PAIRS | {"label": ["1", "1", "0"]},
        TUPLES,
        TUPLES | {"negative": ["20", "91"]},
        {"text": ["0", "10", "50"], "label": ["a", "a", "b"]},
    ],
)
def test_the_names_of_metrics_are_known_before(columns):
    assert metric_names(format_of(list(columns))) == list(evaluated(columns)[0])


@pytest.mark.parametrize("kind", ["score", "label"])
def test_the_names_of_a_cross_encoders_metrics_are_known_before(kind):
    class Score:
        def score(self, one, two, **options):
            return torch.tensor([float(text) for text in two])

    columns = PAIRS | {kind: [1, 1, 0]}
    layout = format_of(list(columns))
    found = evaluate_cross_encoder(Score(), Dataset.from_dict(columns), layout)
    assert metric_names(layout, cross_encoder=True) == list(found)


def test_the_names_of_a_classifiers_metrics_are_known_before():
    columns = PAIRS | {"label": ["same", "same", "other"]}
    layout = format_of(list(columns))
    classifier = SoftmaxClassification(2, 2), ["same", "other"]
    found = evaluate_encoder(Angles(), Dataset.from_dict(columns), layout, classifier=classifier)
    assert metric_names(layout, classifier=True) == list(found)


def test_a_text_that_is_its_own_answer():
    """It is one where the data say nothing else; beside another it is none."""
    found, _ = evaluated({"anchor": ["0", "40"], "positive": ["0", "50"]})
    assert found["recall@1"] == 1
    found, _ = evaluated({"anchor": ["0", "0", "40"], "positive": ["0", "10", "50"]})
    assert found["recall@1"] == 1


def test_metrics_are_of_the_numbers_that_count():
    """Those that `encode` gives or fewer; a classifier has them all, which it was made for."""
    pytest.importorskip("transformers")
    from fastsim.encoders.encoder import Encoder
    from tests import models

    plain = Encoder.from_pretrained(models.tiny_bert())
    texts = models.texts(24)
    columns = {"sentence1": texts[:12], "sentence2": texts[12:], "label": [0, 1] * 6}
    data, layout = Dataset.from_dict(columns), format_of(list(columns))
    cut = Encoder(plain.model, plain.tokenizer, truncate_dim=3)
    found = [
        evaluate_encoder(encoder, data, layout, **more)
        for encoder, more in ((plain, {"width": 3}), (cut, {}), (cut, {"width": 9}), (plain, {}))
    ]
    assert found[0] == found[1] == found[2] != found[3]
    more = {"classifier": (SoftmaxClassification(32, 2), [0, 1])}
    assert evaluate_encoder(cut, data, layout, **more) == evaluate_encoder(
        plain, data, layout, **more
    )


@pytest.mark.parametrize("no", [0, "0", False, "false", "False"])
def test_labels_are_binary_where_both_are_there(no):
    yes = not no if isinstance(no, bool) else {0: 1, "0": "1"}.get(no, "true")
    assert is_binary([yes, no, yes])
    assert as_binary([yes, no, yes]) == [1, 0, 1]
    assert not is_binary([yes, yes])
    assert not is_binary([yes, no, 2])
    assert not is_binary(["0", "true"])


@pytest.mark.parametrize(
    ("columns", "metric"),
    [
        (("sentence1", "sentence2", "score"), "spearman_cosine"),
        (("sentence1", "sentence2", "label"), "average_precision_cosine"),
        (("anchor", "positive"), "ndcg@10"),
        (("anchor", "positive", "negative"), "triplet_accuracy_cosine"),
        (("text", "label"), "ndcg@10"),
    ],
)
def test_the_metric_that_stands_for_the_quality_is_measured(columns, metric):
    values = {"score": [0.1, 0.2, 0.9, 0.7], "label": [0, 1, 1, 0]}
    texts = (["0", "10", "20", "35"], ["3", "19", "22", "80"], ["90", "91", "92", "93"])
    data = {n: values.get(n, text) for n, text in zip(columns, texts, strict=False)}
    found, _ = evaluated(data)
    assert primary_metric(format_of(list(columns))) == metric
    assert metric in found
    pairs = format_of(["sentence1", "sentence2", "label"])
    assert primary_metric(pairs, classifier=True) == "accuracy"
    assert primary_metric(pairs, cross_encoder=True) == "average_precision"


@pytest.mark.parametrize(
    ("columns", "more", "said"),
    [
        ({"anchor": ["0"], "positive": ["1"]}, {"cross_encoder": True}, "for a cross-encoder"),
        ({"sentence1": ["0"] * 2, "sentence2": ["1"] * 2, "label": [1, 1]}, {}, "labels 0 and 1"),
        (
            {"sentence1": ["0"] * 2, "sentence2": ["1"] * 2, "label": ["a", "c"]},
            {"classes": ["a", "b"]},
            "wanted classes that the model was trained on .a, b., got 'c'",
        ),
        ({"text": ["0", "0", "1"], "label": ["a", "a", "b"]}, {}, "two different texts, got none"),
    ],
)
def test_data_without_a_metric_are_refused(columns, more, said):
    with pytest.raises(ValueError, match=f"^data: .*{said}"):
        check_evaluation(Dataset.from_dict(columns), format_of(list(columns)), **more)


def test_an_embedding_that_is_not_finite_is_no_embedding():
    with pytest.raises(ModelError, match="1 of 4 texts have an embedding with NaN"):
        evaluated({"anchor": ["0", "1"], "positive": ["2", "nan"]})
    vectors = torch.zeros(5, 3)
    assert check_vectors(vectors) is vectors
    vectors[1, 2], vectors[3] = torch.inf, torch.nan
    with pytest.raises(ModelError, match="2 of 5 texts"):
        check_vectors(vectors)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("kind", ["score", "label", "negative"])
def test_the_encoders_own_similarity_comes_first(kind, similarity):
    values = {"score": [1.0, 0.5, 0.0], "label": ["1", "1", "0"], "negative": ["20", "91", "7"]}
    columns = PAIRS | {kind: values[kind]}
    if kind == "negative":
        columns = dict(zip(("anchor", "positive", "negative"), columns.values(), strict=True))
    layout, plain = format_of(list(columns)), evaluated(columns)[0]
    encoder = Angles()
    encoder.similarity = similarity
    found = evaluate_encoder(encoder, Dataset.from_dict(columns), layout)
    assert next(iter(found)).endswith(f"_{similarity}")
    assert found == plain  # whatever the order
    metric = primary_metric(layout, similarity=similarity)
    assert metric == primary_metric(layout).replace("cosine", similarity)
    assert metric in found


@pytest.mark.parametrize(("similarity", "rank"), [("cosine", 2), ("dot", 1), ("euclidean", 2)])
def test_retrieval_ranks_by_the_encoders_similarity(similarity, rank):
    """By the cosine if there is no ranking by another. The answers are long, or opposite and short.

    Of the labelled texts "5,5" is a query too, whose answer is second by either.
    """
    encoder = Points()
    encoder.similarity = similarity
    tuples = {"anchor": ["1,0", "-1,0"], "positive": ["5,5", "1,0.1"]}
    labelled = {"text": ["1,0", "5,5", "1,0.1"], "label": ["a", "a", "b"]}
    for columns, wanted in ((tuples, 1 / rank), (labelled, (1 / rank + 1 / 2) / 2)):
        found = evaluate_encoder(encoder, Dataset.from_dict(columns), format_of(list(columns)))
        assert found["mrr@10"] == wanted
