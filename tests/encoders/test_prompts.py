"""Prompts: which one a text gets, and its tokens in the pooling."""

import pytest
import torch

from fastsim.encoders.encoder import Encoder
from tests import models
from tests.encoders.close import assert_theirs

pytest.importorskip("transformers")
TEXTS = models.texts()


def test_prompts_of_queries_and_documents_left_out_of_the_pooling(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    for include in (True, False):
        encoder = Encoder.from_pretrained(models.tiny_bert())
        encoder.prompts = {"query": "the question : ", "document": "is the "}
        encoder.include_prompt = include
        encoder.save_pretrained(tmp_path / f"{include}")
        theirs = sentence_transformers.SentenceTransformer(
            str(tmp_path / f"{include}"), device="cpu"
        )
        again = Encoder.from_pretrained(tmp_path / f"{include}")
        for name in ("query", "document"):
            found = getattr(again, f"encode_{name}")(TEXTS)
            assert_theirs(found, theirs, TEXTS, f"encode_{name}")
    half = again.encode_query(TEXTS, dtype=torch.float16, to_numpy=True)
    assert half.dtype == "float16"
    assert (half == again.encode_query(TEXTS, to_numpy=True).astype("float16")).all()


def test_a_prompt_may_be_a_name_or_a_text():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts, encoder.default_prompt = {"query": "the question : ", "usual": "is "}, "usual"

    def put_before(prompt):
        return encoder.encode([prompt + text for text in TEXTS], prompt="")

    assert torch.equal(encoder.encode(TEXTS), put_before("is "))
    assert torch.equal(encoder.encode(TEXTS, prompt="query"), put_before("the question : "))
    assert torch.equal(encoder.encode(TEXTS, prompt="the "), put_before("the "))
    assert torch.equal(encoder.encode_query(TEXTS, prompt="the "), put_before("the "))
    assert torch.equal(encoder.encode_document(TEXTS, prompt="the "), put_before("the "))


@pytest.mark.parametrize("template", ["$A", "<end> $A", "$A <end>", "<end> $A <end>"])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_a_prompt_is_left_out_whatever_begins_and_ends_a_text(template, pooling, tmp_path):
    """Many decoders have a token that begins a text and none that ends it."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from tokenizers.processors import TemplateProcessing

    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling=pooling)
    encoder.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<end>", encoder.tokenizer.eos_token_id)]
    )
    encoder.prompts, encoder.include_prompt = {"query": "is the "}, False
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # One by one: with padding they would pool other tokens.
    found = Encoder.from_pretrained(tmp_path / "model").encode_query(TEXTS)
    assert_theirs(found, theirs, TEXTS, "encode_query", batch_size=1)


def test_a_prompt_left_out_counts_in_the_weights_of_positions(tmp_path):
    """As in sentence-transformers: the first token after a prompt of three has weight four."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_bert(), pooling="weighted_mean")
    encoder.prompts, encoder.include_prompt = {"query": "is the "}, False
    encoder.save_pretrained(tmp_path)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert_theirs(encoder.encode_query(TEXTS), theirs, TEXTS, "encode_query")


def test_a_prompt_that_ends_like_padding_is_left_out_whole():
    """Where the tokenizer adds no token, its last one is not one that ends a text."""
    encoder = Encoder.from_pretrained(models.tiny_decoder())
    encoder.include_prompt = False
    assert encoder.tokenizer.pad_token == "<end>"
    mask = encoder.tokenize(["is the"], "the <end> ")["pooling_mask"]
    assert mask.tolist() == [[0, 0, 1, 1]]


def test_a_query_with_a_prompt_is_no_answer_to_itself():
    from datasets import Dataset

    from fastsim.training.evaluation import evaluate_encoder
    from fastsim.training.formats import format_of

    class Counts(Encoder):
        """Letters are counted, and the prompt: a text is closest to itself under any prompt."""

        def encode(self, texts, *, prompt=None, **options):
            rows = [[text.count(letter) for letter in "abc"] + [len(prompt)] for text in texts]
            return torch.tensor(rows, dtype=torch.float32)

        dim = 4

    encoder = Counts.from_pretrained(models.tiny_bert())
    encoder.prompts = {"query": "q", "document": ""}
    pairs = {"anchor": ["aab", "ccb"], "positive": ["ab", "aab"]}
    found = evaluate_encoder(encoder, Dataset.from_dict(pairs), format_of(list(pairs)))
    # "aab" finds "ab" when it is not its own answer; "ccb" finds "ab" before "aab".
    assert found["recall@1"] == 0.5


def test_a_column_has_the_prompt_of_its_name_or_part_or_the_default():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts = {"query": "q", "passage": "p", "negative_2": "n", "usual": "u"}
    for default, other in ((None, ""), ("usual", "u")):
        encoder.default_prompt = default
        assert {
            name: encoder.prompt_of_column(name)
            for name in ("anchor", "positive", "negative", "negative_2", "text", "sentence1")
        } == {
            **{"anchor": "q", "positive": "p", "negative": "p", "negative_2": "n"},
            **{"text": other, "sentence1": other},
        }
    encoder.prompts |= {"anchor": "a", "document": "d", "corpus": "c"}
    assert encoder.prompt_of_column("anchor") == "a"
    assert encoder.prompt_of_column("positive") == "d"
    del encoder.prompts["document"], encoder.prompts["passage"]
    assert encoder.prompt_of_column("positive") == "c"
    said = []
    encoder.encode = lambda texts, prompt: said.append(prompt)
    encoder.encode_document([])
    assert said == ["corpus"]
