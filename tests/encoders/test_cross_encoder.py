"""The cross-encoder."""

import pytest
import torch

from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Encoder
from tests import models

pytest.importorskip("transformers")
TEXTS = models.texts()


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
