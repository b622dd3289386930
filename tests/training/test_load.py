"""Models from their folders: the type of their weights, prompts, lengths; searches."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sklearn")
from datasets import Dataset

from fastsim.dot_products import as_cosines
from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Encoder
from fastsim.encoders.names import ModelError
from fastsim.scores import top_k
from fastsim.training import demo
from fastsim.training.data import read_data
from fastsim.training.evaluation import evaluate_encoder
from fastsim.training.formats import format_of
from fastsim.training.load import evaluate_model, load_encoder, search_texts
from fastsim.training.run import train
from tests import models
from tests.training.angles import Angles
from tests.training.runs import options

KEPT, _ = demo.situations()


@pytest.mark.parametrize("kind", [Encoder, CrossEncoder])
def test_weights_of_16_bits_are_read_as_single(kind, tmp_path):
    model = kind.from_pretrained(models.tiny_bert()).bfloat16()
    model.save_pretrained(tmp_path / "half")
    again = kind.from_pretrained(tmp_path / "half")
    assert {value.dtype for value in again.parameters()} == {torch.float32}
    for (name, one), (other, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(one.float(), two)


@pytest.fixture
def prompted(tmp_path):
    """The folder of an encoder with a prompt."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts = {"query": "the question : "}
    encoder.save_pretrained(tmp_path / "prompted")
    return tmp_path / "prompted"


def test_prompts_and_lengths_are_given_besides_those_of_the_folder(prompted):
    more = {"document": "is the "}
    encoder = load_encoder(prompted, cpu=True, prompts=more)
    assert encoder.prompts == {"query": "the question : ", "document": "is the "}
    assert load_encoder(prompted, cpu=True).prompts == {"query": "the question : "}
    columns = {"anchor": [row[0] for row in KEPT], "positive": [row[1] for row in KEPT]}
    data, layout = Dataset.from_dict(columns), format_of(list(columns))
    found = [
        evaluate_model(prompted, data, layout, cpu=True, **options)
        for options in ({}, {"prompts": more}, {"max_length": 5})
    ]
    assert found[0] == evaluate_encoder(Encoder.from_pretrained(prompted), data, layout)
    assert found[1] == evaluate_encoder(encoder, data, layout)
    cut = Encoder.from_pretrained(prompted, max_length=5)
    assert found[2] == evaluate_encoder(cut, data, layout)
    assert found[0] != found[1]
    assert found[0] != found[2]


def test_a_search_asks_with_the_prompt_of_queries():
    texts = ["0", "10", "90"]
    encoder = Angles(query="60", document="2")
    (found,) = search_texts(encoder, ["0"], texts, 2)
    assert found["query"] == "0"
    # Degrees of the texts: 2, 12 and 92; of the query: 60.
    hits = [(hit["rank"], hit["row"], hit["text"]) for hit in found["hits"]]
    assert hits == [(1, 2, "90"), (2, 1, "10")]
    known = encoder.encode_document(["90", "10", "0"])
    (found,) = search_texts(encoder, ["0"], ["90", "10", "0"], 9, corpus=known)
    assert [hit["row"] for hit in found["hits"]] == [0, 1, 2]


@pytest.mark.parametrize("spread", [1e-3, 1, 1e3])
def test_a_search_compares_as_the_folder_says(spread, tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.similarity = "dot"
    encoder.save_pretrained(tmp_path / "dot")
    encoder = load_encoder(tmp_path / "dot", cpu=True)
    texts = models.texts(40)
    generator = torch.Generator().manual_seed(torch.seed())
    lengths = (torch.rand(40, 1, generator=generator) * math.log(spread)).exp()
    corpus = encoder.encode_document(texts) * lengths
    asked = encoder.encode_query(texts[:3]).double()
    answers = search_texts(encoder, texts[:3], texts, 40, corpus=corpus)
    # A cosine in float32 of rows of D + 1 numbers, times the lengths.
    eps = torch.finfo(torch.float32).eps
    for query, found in zip(asked, answers, strict=True):
        products = corpus.double() @ query
        bound = 2 * (encoder.dim + 1) * eps * corpus.double().norm(dim=1).max() * query.norm()
        rows = [hit["row"] for hit in found["hits"]]
        scores = torch.tensor([hit["score"] for hit in found["hits"]], dtype=torch.float64)
        assert sorted(rows) == list(range(40))
        assert (scores - products[rows]).abs().max() <= bound
        assert (products[rows].diff() <= 2 * bound).all()


@pytest.mark.parametrize("similarity", ["euclidean", "manhattan"])
def test_a_search_by_another_similarity_is_refused(similarity):
    encoder = Angles()
    encoder.similarity = similarity
    with pytest.raises(ModelError, match=f"cosine or dot, got similarity_fn_name '{similarity}'"):
        search_texts(encoder, ["0"], ["1"], 1)
    assert encoder.asked == []  # nothing was encoded in vain


def test_dot_products_of_rows_of_zeros():
    zeros = torch.zeros(2, 3)
    for queries, corpus in ((zeros, torch.eye(3)), (torch.eye(3)[:2], zeros), (zeros, zeros)):
        asked, known, lengths = as_cosines(queries, corpus, "dot")
        values, _ = top_k(asked, known, 1)
        assert torch.equal(values * lengths, torch.zeros(2, 1))


@pytest.fixture
def crosses(tmp_path):
    """Folders of one cross-encoder: ours and sentence-transformers'."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    CrossEncoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path / "ours")
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    return [tmp_path / "ours", tmp_path / "theirs"]


def test_a_cross_encoder_gives_no_embeddings(crosses):
    for folder in crosses:
        with pytest.raises(ModelError, match=f"got the cross-encoder '{folder}'"):
            load_encoder(folder, cpu=True)


def test_cross_encoders_of_either_kind_are_evaluated_and_trained(crosses, tmp_path):
    rows = [{"sentence1": a, "sentence2": b, "score": 0.5} for a, b, *_ in KEPT[:8]]
    rows[0]["score"] = 1.0
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, layout = read_data(file)
    one, two = (evaluate_model(folder, data, layout, cpu=True) for folder in crosses)
    assert one == two
    asked = options(tmp_path, str(file), model=str(crosses[1]), max_steps=1)
    asked.architecture = "cross-encoder"
    train(asked)
    assert evaluate_model(asked.output, data, layout, cpu=True).keys() == one.keys()
