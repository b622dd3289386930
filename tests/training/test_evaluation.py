"""Evaluation by columns and of searches, with embeddings by hand."""

import json
import math
import re

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
from datasets import Dataset

from fastsim.encoders.names import ModelError
from fastsim.losses import SoftmaxClassification
from fastsim.training.beir import evaluate_retrieval, ranking_metrics, read_beir
from fastsim.training.data import DataError
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


class Angles:
    """An encoder of texts that are angles in degrees: the closer the nearer. A prompt turns them.

    Prompts are numbers too; `asked` holds what was encoded with which.
    """

    dim = 2
    similarity = "cosine"

    def __init__(self, **prompts):
        self.prompts, self.asked = prompts, []

    def prompt_of_column(self, name):
        return self.prompts.get(name, "0")

    def encode(self, texts, *, prompt="0", **options):
        self.asked += [(prompt, text) for text in texts]
        angles = torch.tensor([float(prompt) + float(text) for text in texts]).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], 1)

    def encode_query(self, texts, **options):
        return self.encode(texts, prompt=self.prompts.get("query", "0"))

    def encode_document(self, texts, **options):
        return self.encode(texts, prompt=self.prompts.get("document", "0"))


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
        ({"anchor": ["0"], "positive": ["1"]}, {"cross_encoder": True}, "a cross-encoder is"),
        ({"sentence1": ["0"] * 2, "sentence2": ["1"] * 2, "label": [1, 1]}, {}, "labels 0 and 1"),
        (
            {"sentence1": ["0"] * 2, "sentence2": ["1"] * 2, "label": ["a", "c"]},
            {"classes": ["a", "b"]},
            "wanted classes that the model was trained on, a, b, got 'c'",
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


# ---- searches ----


def test_ranking_metrics_by_hand():
    """Linear gains, as trec_eval; what is judged 0 or less is not relevant."""
    runs = {"one": ["d0", "d2", "none", "d1"], "two": [f"e{i}" for i in range(20)]}
    grades = {
        "one": {"d0": 1, "d1": 3, "d2": 0, "d3": -1, "d4": 2},
        "two": {f"e{i}": 1 for i in range(8, 20)},
    }
    found = ranking_metrics(runs, grades, depth=12)
    gain = 1 + 3 / math.log2(5)
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    tail = sum(1 / math.log2(rank + 1) for rank in (9, 10))
    most = sum(1 / math.log2(rank + 1) for rank in range(1, 11))
    assert found["ndcg@10"] == pytest.approx((gain / ideal + tail / most) / 2)
    assert found["mrr@10"] == pytest.approx((1 + 1 / 9) / 2)
    assert found["recall@10"] == pytest.approx((2 / 3 + 2 / 12) / 2)
    assert found["recall@12"] == pytest.approx((2 / 3 + 4 / 12) / 2)


def test_a_search_is_that_of_its_files(tmp_path):
    """Titles are read before texts, a document is no answer to the query with its id."""

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(
        "corpus.jsonl",
        [
            {"_id": "x", "title": "", "text": "0"},
            {"_id": "y", "title": "1", "text": "e1"},  # "1 e1"
            {"_id": "z", "text": "20"},
        ],
    )
    write("queries.jsonl", [{"_id": "x", "text": "0"}, {"_id": "q", "text": "19"},
                            {"_id": "unjudged", "text": "7"}])  # fmt: skip
    (tmp_path / "qrels").mkdir()
    judged = "query-id\tcorpus-id\tscore\nx\ty\t1\nq\tz\t0\nq\ty\t2\nunjudged\tx\t0\n"
    (tmp_path / "qrels/test.tsv").write_text(judged)

    class Written(Angles):
        """Of a document with a title the two make the number."""

        def encode(self, texts, **options):
            return super().encode([text.replace(" ", "") for text in texts], **options)

    encoder = Written(query="1", document="2")
    found = evaluate_retrieval(encoder, tmp_path, depth=2)
    assert sorted(encoder.asked) == [("1", "0"), ("1", "19"), ("2", "0"), ("2", "1e1"), ("2", "20")]
    # Degrees of the documents: x 2, y 12, z 22. The query x, at 1, is answered by y before z; the
    # query q, at 20, by z before y.
    assert found["mrr@10"] == (1 + 1 / 2) / 2
    assert found["recall@2"] == 1
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    with open(tmp_path / "qrels/test.tsv", "a") as handle:
        handle.write("q\ty\t2\nq\tz\t1\n")  # the first says what is known, the second does not
    with pytest.raises(DataError, match="line 7: 'z' is judged 0 and 1 for 'q'"):
        evaluate_retrieval(encoder, tmp_path)
    for judged, said in (
        ("x\ty\t1\nq\ty\t1.0\n", r"line 2: wanted .* a whole number, .*, got 'q, y, 1\.0'$"),
        ("query\tdoc\trelevance\nx\ty\t1\n", "got 'query, doc, relevance'; a header ends in s"),
        ("x\n", "line 1: wanted query-id, corpus-id and a whole number, the score, got 'x'"),
    ):
        (tmp_path / "qrels/test.tsv").write_text(judged)
        with pytest.raises(DataError, match=said):
            evaluate_retrieval(encoder, tmp_path)
    write("corpus.jsonl", [{"_id": "x", "title": "half", "text": "\ud800"}])
    with pytest.raises(DataError, match="line 1: text: the text holds half of a surrogate pair"):
        evaluate_retrieval(encoder, tmp_path)


def retrieval_set(folder, corpus, queries, judged="q\tx\t1\n"):
    """A folder in BEIR's layout."""
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels/test.tsv").write_text(judged)
    return folder


def test_a_document_may_be_empty_and_a_query_not(tmp_path):
    """Some of BEIR's own FiQA are."""
    query = {"_id": "q", "text": "a"}
    documents = [
        {"_id": "x", "title": "", "text": ""},
        {"_id": "y", "title": None, "text": "b "},
        {"_id": "z", "title": " t", "text": "\n"},
    ]
    corpus, queries, _ = read_beir(retrieval_set(tmp_path, documents, [query]))
    assert corpus == {"x": "", "y": "b", "z": "t"}
    assert queries == {"q": "a"}
    for other in ({"_id": "v"}, {"_id": "v", "title": "", "contents": "c"}, {"text": ""}):
        retrieval_set(tmp_path, [*documents, other], [query])
        with pytest.raises(DataError, match=r"corpus\.jsonl, line 4: wanted _id and text"):
            read_beir(tmp_path)
    retrieval_set(tmp_path, documents, [query, {"_id": "p", "text": ""}])
    with pytest.raises(DataError, match=r"queries\.jsonl, line 2: wanted _id and text"):
        read_beir(tmp_path)


@pytest.mark.parametrize("value", [["a", "b"], 3, 0, False, {}])
def test_what_is_no_text_is_none_of_a_document(value, tmp_path):
    for field in ("title", "text"):
        row = {"_id": "x", "title": "a", "text": "b"} | {field: value}
        retrieval_set(tmp_path, [row], [{"_id": "q", "text": "a"}])
        said = re.escape(f"line 1: {field}: wanted a text, got {value!r}")
        with pytest.raises(DataError, match=said):
            read_beir(tmp_path)


def test_documents_are_ranked_by_the_encoders_similarity(tmp_path):
    class Points(Angles):
        """An encoder of texts that are points x,y."""

        def encode(self, texts, **options):
            return torch.tensor([[float(x) for x in text.split(",")] for text in texts])

    documents = [{"_id": "near", "text": "1,0"}, {"_id": "long", "text": "5,5"}]
    judged = "q\tlong\t1\n"
    retrieval_set(tmp_path, documents, [{"_id": "q", "text": "2,0"}], judged)
    encoder = Points()
    assert evaluate_retrieval(encoder, tmp_path)["mrr@10"] == 1 / 2
    encoder.similarity = "dot"
    assert evaluate_retrieval(encoder, tmp_path)["mrr@10"] == 1
    encoder.similarity = "euclidean"
    with pytest.raises(ModelError, match="cosine or dot, got similarity_fn_name 'euclidean'"):
        evaluate_retrieval(encoder, tmp_path)
