"""The index of a corpus: all that decides its embeddings makes it another."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from fastsim.encoders.encoder import Dense, Encoder, Normalize
from fastsim.training.index import index_key, indexed
from tests import models

TEXTS = models.texts(5)


def made():
    plain = Encoder.from_pretrained(models.tiny_bert())
    torch.manual_seed(0)
    return Encoder(plain.model, plain.tokenizer, head=[Dense(32, 8)], prompts={"query": "is "})


def add_to_a_weight(encoder):
    with torch.no_grad():
        next(encoder.parameters())[0, 0] += 1


def normalize(encoder):
    encoder.head.append(Normalize())


CHANGES = {
    "a weight": add_to_a_weight,
    "an activation": lambda encoder: setattr(encoder.head[0], "activation", torch.nn.ReLU()),
    "a head": normalize,
    "a pooling": lambda encoder: setattr(encoder, "pooling", "max"),
    "a length": lambda encoder: setattr(encoder, "max_length", 7),
    "lower case": lambda encoder: setattr(encoder, "lower_case", True),
    "a prompt": lambda encoder: encoder.prompts.update(document="the "),
    "a default": lambda encoder: setattr(encoder, "default_prompt", "query"),
    "what is pooled": lambda encoder: setattr(encoder, "include_prompt", False),
    "a width": lambda encoder: setattr(encoder, "truncate_dim", 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_encoder_has_another_index(change, tmp_path):
    encoder, path = made(), tmp_path / "index"
    first = indexed(encoder, TEXTS, path)
    assert torch.equal(first, encoder.encode_document(TEXTS))
    assert torch.equal(indexed(copy.deepcopy(encoder), TEXTS, path), first)
    before = index_key(encoder, TEXTS)
    CHANGES[change](encoder)
    assert index_key(encoder, TEXTS) != before
    assert torch.equal(indexed(encoder, TEXTS, path), encoder.encode_document(TEXTS))


def test_other_texts_have_another_index():
    encoder = made()
    lists = (["ab", "c"], ["a", "bc"], ["c", "ab"], ["ab"], ["ab", "c", ""])
    assert len({index_key(encoder, texts) for texts in lists}) == len(lists)
