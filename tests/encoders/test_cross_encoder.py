"""The cross-encoder."""

import copy
import json

import pytest
import torch

from fastsim.encoders.cross_encoder import CrossEncoder, is_cross_encoder
from fastsim.encoders.encoder import Encoder
from fastsim.encoders.names import ModelError
from tests import models
from tests.measure import assert_close

pytest.importorskip("transformers")
TEXTS = models.texts()
CUT = {"padding": True, "truncation": True, "return_tensors": "pt"}


def test_a_cross_encoder_wants_as_many_texts_on_either_side():
    encoder = CrossEncoder.from_pretrained(models.tiny_bert())
    assert encoder.score(["a", "b"], ["c", "d"]).shape == (2,)
    with pytest.raises(ValueError, match="second: wanted 1 texts, as first has, got 2"):
        encoder.score(["a"], ["b", "c"])
    with pytest.raises(TypeError, match="first: wanted a list of str, got one str"):
        encoder.score("ab", ["c", "d"])
    with pytest.raises(TypeError, match="second: wanted a list of str, got int in it"):
        encoder.score(["a"], [1])
    with pytest.raises(ValueError, match="batch_size: wanted at least 1, got -1"):
        encoder.score(["a"], ["b"], batch_size=-1)
    with pytest.raises(TypeError, match="batch_size: wanted an int, got str"):
        encoder.score(["a"], ["b"], batch_size="x")
    with pytest.raises(ValueError, match="progress: wanted one of None, False, True, got 'no'"):
        encoder.score(["a"], ["b"], progress="no")
    with pytest.raises(TypeError, match="first: wanted a list of str, got NoneType"):
        encoder.tokenize(None, ["a"])
    with pytest.raises(ValueError, match="second: wanted 1 texts, as first has, got 2"):
        encoder.tokenize(["a"], ["b", "c"])
    with pytest.raises(TypeError, match="tokenizer: wanted a tokenizer, got NoneType"):
        CrossEncoder(encoder.model, None)
    with pytest.raises(TypeError, match="path: wanted a str or a path, got int"):
        encoder.save_pretrained(3)
    with pytest.raises(TypeError, match="name: wanted a str or a path, got NoneType"):
        is_cross_encoder(None)


def test_a_cross_encoder_keeps_its_length(tmp_path):
    """Its own folder says it, or that of the encoder that it begins with."""
    Encoder.from_pretrained(models.tiny_bert(), max_length=9).save_pretrained(tmp_path / "encoder")
    cross = CrossEncoder.from_pretrained(tmp_path / "encoder")
    cross.save_pretrained(tmp_path / "cross")
    again = CrossEncoder.from_pretrained(tmp_path / "cross")
    assert (cross.max_length, again.max_length) == (9, 9)
    long = [" ".join(TEXTS[:8])]
    assert again.tokenize(long, long)["input_ids"].shape == (1, 9)
    shorter = CrossEncoder.from_pretrained(tmp_path / "encoder", max_length=7)
    assert shorter.max_length == 7


def test_a_pair_without_a_token_has_a_score():
    """Alone as beside others, where the tokenizer adds no token of its own."""
    from tokenizers.processors import TemplateProcessing

    encoder = CrossEncoder.from_pretrained(models.tiny_bert())
    nothing_added = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    encoder.tokenizer.backend_tokenizer.post_processor = nothing_added
    assert encoder.score([""], [""]).isfinite().all()
    assert encoder.score(["", "the"], ["", TEXTS[0]]).isfinite().all()


@pytest.mark.parametrize("mode", [True, False])
def test_scores_of_a_cross_encoder_leave_its_mode(mode):
    encoder = CrossEncoder.from_pretrained(models.tiny_bert()).train(mode)
    first, second = (encoder.score(TEXTS[:4], TEXTS[4:8], batch_size=3) for _ in range(2))
    assert encoder.training == encoder.model.training == mode
    assert torch.equal(first, second)  # no dropout
    encoder.tokenizer = None
    with pytest.raises(TypeError):
        encoder.score(TEXTS[:4], TEXTS[4:8])
    assert encoder.training == mode


def test_logits_of_a_model_in_half_precision_are_float32():
    """A loss of them is then computed in float32."""
    encoder = CrossEncoder.from_pretrained(models.tiny_bert()).bfloat16()
    assert encoder(encoder.tokenize(TEXTS[:2], TEXTS[2:4])).dtype == torch.float32
    assert encoder.double()(encoder.tokenize(TEXTS[:2], TEXTS[2:4])).dtype == torch.float64


def test_a_cross_encoder_of_sentence_transformers_is_one(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    CrossEncoder.from_pretrained(models.tiny_bert(), max_length=9).save_pretrained(
        tmp_path / "ours"
    )
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "ours"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    assert (tmp_path / "theirs/modules.json").is_file()
    Encoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path / "encoder")
    found = {name: is_cross_encoder(tmp_path / name) for name in ("ours", "theirs", "encoder")}
    assert found == {"ours": True, "theirs": True, "encoder": False}
    again = CrossEncoder.from_pretrained(tmp_path / "theirs")
    assert again.max_length == 9
    pairs = list(zip(TEXTS[:6], TEXTS[6:12], strict=True))
    dense = torch.tensor(theirs.predict(pairs, activation_fn=torch.nn.Identity()))
    tokens = theirs.tokenizer(*zip(*pairs, strict=True), max_length=9, **CUT)
    truth = theirs.model.double()(**tokens).logits.detach()[:, 0]
    assert_close("scores", again.score(TEXTS[:6], TEXTS[6:12]), truth, dense, torch.float32)


def test_a_cross_encoder_of_further_parts_is_refused(tmp_path):
    """Its scores are not those of its transformer."""
    Encoder.from_pretrained(models.tiny_bert(), dense=1).save_pretrained(tmp_path)
    about = tmp_path / "config_sentence_transformers.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"model_type": "CrossEncoder"}))
    with pytest.raises(ModelError, match="wanted a cross-encoder with only a transformer"):
        CrossEncoder.from_pretrained(tmp_path)


def test_a_default_prompt_of_a_cross_encoder_is_refused(tmp_path):
    """It would be put before each first text; one that is empty, or an encoder's, changes nothing.

    A new cross-encoder on an encoder's folder is trained without its prompt.
    """
    sentence_transformers = pytest.importorskip("sentence_transformers")
    CrossEncoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path / "ours")
    for text in ("", "the question : "):
        theirs = sentence_transformers.CrossEncoder(
            str(tmp_path / "ours"), device="cpu", prompts={"query": text}
        )
        theirs.save_pretrained(str(tmp_path / "unused"))
        CrossEncoder.from_pretrained(tmp_path / "unused")
        theirs.default_prompt_name = "query"
        theirs.save_pretrained(str(tmp_path / "theirs"))
        if not text:
            CrossEncoder.from_pretrained(tmp_path / "theirs")
    with pytest.raises(
        ModelError, match=r"theirs', which has default_prompt_name 'query', .* 'the quest"
    ):
        CrossEncoder.from_pretrained(tmp_path / "theirs")
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts, encoder.default_prompt = {"query": "the question : "}, "query"
    encoder.save_pretrained(tmp_path / "encoder")
    CrossEncoder.from_pretrained(tmp_path / "encoder")


def test_texts_that_only_the_encoders_folder_lower_cases_are_refused(tmp_path):
    """A tokenizer that does it itself takes that along."""
    for name, folder in (("kept", models.tiny_decoder()), ("lower", models.tiny_bert())):
        plain = Encoder.from_pretrained(folder)
        encoder = Encoder(plain.model, plain.tokenizer, lower_case=True)
        encoder.save_pretrained(tmp_path / name)
    CrossEncoder.from_pretrained(tmp_path / "lower")
    with pytest.raises(ModelError, match="kept' lower-cases texts"):
        CrossEncoder.from_pretrained(tmp_path / "kept")


def test_a_decoder_without_padding_pads_with_its_end():
    encoder = CrossEncoder.from_pretrained(models.tiny_decoder())
    assert encoder.model.config.pad_token_id == encoder.tokenizer.eos_token_id
    together = encoder.score(TEXTS[:6], TEXTS[6:12])
    pairs = [([one], [two]) for one, two in zip(TEXTS[:6], TEXTS[6:12], strict=True)]
    alone = torch.cat([encoder.score(*pair) for pair in pairs])
    double = copy.deepcopy(encoder).double()
    truth = torch.cat([double(encoder.tokenize(*pair)).detach() for pair in pairs])
    assert_close("scores", together, truth, alone, torch.float32)
    encoder.tokenizer.pad_token = encoder.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: wanted one with a padding or an end"):
        CrossEncoder(encoder.model, encoder.tokenizer)


@pytest.mark.parametrize("folder", [models.tiny_bert, models.tiny_decoder])
def test_no_pairs_have_no_logits(folder):
    model = CrossEncoder.from_pretrained(folder())
    features = model.tokenize([], [])
    assert {len(part) for part in features.values()} == {0}
    logits = model(features)
    assert logits.shape == (0,)
    logits.sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
