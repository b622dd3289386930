"""The index of a corpus: all that decides its embeddings makes it another."""

import copy
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")
from fastsim.encoders.encoder import Dense, Encoder, Normalize
from fastsim.files import OutputError
from fastsim.training.index import load_or_encode, model_key, texts_key
from tests import models

TEXTS = [text.capitalize() for text in models.texts(5)]


def made():
    plain = Encoder.from_pretrained(models.tiny_bert())
    torch.manual_seed(0)
    return Encoder(plain.model, plain.tokenizer, head=[Dense(32, 8)], prompts={"query": "is "})


def add_to_a_weight(encoder):
    with torch.no_grad():
        next(encoder.parameters())[0, 0] += 1


def normalize(encoder):
    encoder.head.append(Normalize())


def with_setting(encoder, name, value):
    """Another setting of its transformer, whose weights stay."""
    config = copy.deepcopy(encoder.model.config)
    setattr(config, name, value)
    model = type(encoder.model)(config).eval()
    model.load_state_dict(encoder.model.state_dict())
    encoder.model = model


def lose_lower_case(encoder):
    from tokenizers import normalizers

    encoder.tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)


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
    "a precision": lambda encoder: encoder.double(),
    "the heads": lambda encoder: with_setting(encoder, "num_attention_heads", 4),
    "the activation": lambda encoder: with_setting(encoder, "hidden_act", "relu"),
    "the tokens": lose_lower_case,
    "the end cut off": lambda encoder: setattr(encoder.tokenizer, "truncation_side", "left"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_encoder_has_another_index(change, tmp_path):
    encoder, path = made(), tmp_path / "index"
    first = load_or_encode(encoder, TEXTS, path)
    assert torch.equal(first, encoder.encode_document(TEXTS))
    assert torch.equal(load_or_encode(copy.deepcopy(encoder), TEXTS, path), first)
    before = model_key(encoder), path.read_bytes()
    CHANGES[change](encoder)
    assert model_key(encoder) != before[0]
    with pytest.raises(OutputError, match="' is by another model or prompt; --overwrite"):
        load_or_encode(encoder, TEXTS, path)
    assert path.read_bytes() == before[1]
    vectors = encoder.encode_document(TEXTS)
    assert torch.equal(load_or_encode(encoder, TEXTS, path, overwrite=True), vectors)
    assert torch.equal(load_or_encode(encoder, TEXTS, path), vectors)


def test_other_texts_have_another_index(tmp_path):
    encoder, path = made(), tmp_path / "index"
    lists = (["ab", "c"], ["a", "bc"], ["c", "ab"], ["ab"], ["ab", "c", ""])
    assert len({texts_key(texts) for texts in lists}) == len(lists)
    load_or_encode(encoder, TEXTS, path)
    with pytest.raises(OutputError, match="' is of other texts; --overwrite"):
        load_or_encode(encoder, TEXTS[1:], path)
    add_to_a_weight(encoder)
    with pytest.raises(OutputError, match="' is of other texts and by another model or prompt; "):
        load_or_encode(encoder, TEXTS[1:], path)


def test_the_prompt_of_queries_makes_no_other_index():
    encoder = made()
    key = model_key(encoder)
    encoder.prompts["query"] = "what is "
    assert model_key(encoder) == key


def test_an_index_of_another_version_is_replaced_when_asked(tmp_path):
    from safetensors.torch import save_file

    encoder, path = made(), tmp_path / "index"
    save_file({"vectors": torch.eye(2)}, path, metadata={"kind": "fastsim-index-1", "key": "a"})
    with pytest.raises(OutputError, match="is of another version of fastsim; --overwrite"):
        load_or_encode(encoder, TEXTS, path)
    vectors = load_or_encode(encoder, TEXTS, path, overwrite=True)
    assert torch.equal(vectors, encoder.encode_document(TEXTS))
    save_file({"vectors": vectors}, path, metadata={"kind": "a model"})
    with pytest.raises(ValueError, match="is not a fastsim index"):
        load_or_encode(encoder, TEXTS, path, overwrite=True)


def test_the_same_encoder_elsewhere_has_the_same_index(tmp_path):
    """After texts were tokenized, and in another process from the folder that it was written to."""
    encoder = made()
    key = model_key(encoder)
    encoder.encode(TEXTS)
    assert model_key(encoder) == key
    encoder.save_pretrained(tmp_path)
    code = (
        "import sys, fastsim\n"
        "from fastsim.training.index import model_key\n"
        "encoder = fastsim.Encoder.from_pretrained(sys.argv[1])\n"
        "print(model_key(encoder))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == key


def test_a_tokenizer_in_python_has_its_own_index(tmp_path):
    """Its files say what it does, as those of the others do."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    encoder, keys = made(), []
    words = sorted(encoder.tokenizer.get_vocab().items(), key=lambda word: word[1])
    for number, lower, left_out in ((0, True, 0), (1, True, 0), (2, False, 0), (3, True, 1)):
        file = tmp_path / f"{number}.txt"
        file.write_text("\n".join(word for word, _ in words[: len(words) - left_out]))
        encoder.tokenizer = legacy.BertTokenizerLegacy(str(file), do_lower_case=lower)
        keys.append(model_key(encoder))
    assert keys[0] == keys[1]
    assert len({*keys}) == 3
