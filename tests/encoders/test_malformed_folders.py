"""Folders whose files hold something else than is wanted: `ModelError` with file and key."""

import json
import shutil

import pytest

from fastsim.encoders.cross_encoder import CrossEncoder, is_cross_encoder
from fastsim.encoders.encoder import Encoder, ModelError, Normalize
from tests import models

pytest.importorskip("transformers")
LIMITS, ABOUT = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    Encoder.from_pretrained(models.tiny_bert(), dense=4).save_pretrained(folder)
    return folder


def changed(saved, folder, file, value):
    """A copy of the folder with another value in a file, or with other values of its keys."""
    shutil.copytree(saved, folder)
    if isinstance(value, dict) and file != "modules.json":
        value = json.loads((folder / file).read_text()) | value
    (folder / file).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("file", "value", "said"),
    [
        ("modules.json", {"a": 1}, "wanted a list in .*modules.json', got dict"),
        ("modules.json", [1], "modules.json' .* wanted a list of dict, got int in it"),
        (POOLING, [1], "wanted a dict in .*1_Pooling.config.json', got list"),
        (POOLING, {"pooling_mode": 3}, r"wanted a pooling of .*, got \[3\] in .*1_Pooling'"),
        (POOLING, {"pooling_mode_cls_token": "no"}, "config.json' .* pooling_mode_cls_token: "),
        (POOLING, {"include_prompt": "no"}, "config.json' .* include_prompt: wanted one of None"),
        (DENSE, [1], "wanted a dict in .*2_Dense.config.json', got list"),
        (DENSE, {"activation_function": 3}, "wanted an activation_function .* got 3 in .*2_Dense'"),
        (DENSE, {"activation_function": "torch.nn.GLU"}, "2_Dense' .* activation: wanted one of"),
        (DENSE, {"in_features": "x"}, "2_Dense' .* in_features: wanted an int, got str"),
        (DENSE, {"module_output_name": "x"}, "2_Dense.config.json' .* module_output_name: wanted"),
        (LIMITS, 3, "wanted a dict in .*sentence_bert_config.json', got int"),
        (LIMITS, {"max_seq_length": "x"}, f"{LIMITS}' .* max_seq_length: wanted an int, got str"),
        (LIMITS, {"max_seq_length": 1}, "model' .* max_seq_length: wanted 3 to 64 tokens, got 1"),
        (LIMITS, {"do_lower_case": "no"}, f"{LIMITS}' .* do_lower_case: wanted one of None, False"),
        (ABOUT, [], f"wanted a dict in .*{ABOUT}', got list"),
        (ABOUT, {"prompts": 3}, f"{ABOUT}' .* prompts: wanted {{name: text}}, got int"),
        (ABOUT, {"prompts": {"q": 3}}, rf"{ABOUT}' .* prompts\['q'\]: wanted a str, got int"),
        (ABOUT, {"default_prompt_name": "q"}, f"{ABOUT}' .* default_prompt_name: wanted one of"),
        (ABOUT, {"truncate_dim": "zz"}, f"{ABOUT}' .* truncate_dim: wanted an int, got str"),
        (ABOUT, {"truncate_dim": 0}, f"{ABOUT}' .* truncate_dim: wanted at least 1, got 0"),
    ],
)
def test_a_value_is_refused_by_file_and_key(file, value, said, saved, tmp_path):
    folder = changed(saved, tmp_path / "model", file, value)
    with pytest.raises(ModelError, match=f"^model: .*{said}") as caught:
        Encoder.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_unit_rows_of_something_else_are_refused(key, tmp_path):
    """And older folders, which hold no file of the part, are read."""
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(plain.model, plain.tokenizer, head=[Normalize()])
    encoder.save_pretrained(tmp_path)
    file = tmp_path / "2_Normalize/config.json"
    file.write_text(json.dumps({key: "sentence_embedding"}))
    Encoder.from_pretrained(tmp_path)
    file.write_text(json.dumps({key: "token_embeddings"}))
    with pytest.raises(ModelError, match=f"2_Normalize.config.json' .* {key}: wanted one of None"):
        Encoder.from_pretrained(tmp_path)
    file.unlink()
    file.parent.rmdir()
    assert len(Encoder.from_pretrained(tmp_path).head) == 1


def test_a_head_that_does_not_fit_is_named_with_the_folder(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
    encoder.head.append(Encoder.from_pretrained(models.tiny_bert(), dense=4).head[0])
    encoder.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model' .* head\[1\]: wanted 4 in_features, .* got 32"):
        Encoder.from_pretrained(tmp_path / "model")


def test_a_length_that_is_given_stands_in_for_one_that_does_not_fit(saved, tmp_path):
    """And is refused by its own name."""
    folder = changed(saved, tmp_path / "model", LIMITS, {"max_seq_length": 2})
    for kind, least in ((Encoder, 3), (CrossEncoder, 5)):
        assert kind.from_pretrained(folder, max_length=9).max_length == 9
        with pytest.raises(ValueError, match=f"^max_length: wanted {least} to 64 tokens, got 2"):
            kind.from_pretrained(folder, max_length=2)
        wrong = rf"model' .* max_seq_length: wanted {least} to 64 tokens, got 2"
        with pytest.raises(ModelError, match=wrong):
            kind.from_pretrained(folder)


def test_a_plain_folder(tmp_path):
    for name, config, said in (
        ("list", [1], "wanted a dict in .*config.json', got list"),
        ("kinds", {"architectures": 3}, "config.json' .* architectures: wanted a list of str, got"),
        ("kind", {"architectures": [1]}, "architectures: wanted a list of str, got int in it"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=said):
            is_cross_encoder(tmp_path / name)
    (tmp_path / "adapter").mkdir()
    for config, said in (
        ([1], "wanted a dict in .*adapter_config.json', got list"),
        ({"base_model_name_or_path": 3}, "the adapter .*adapter' names no base model"),
    ):
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=said):
            Encoder.from_pretrained(tmp_path / "adapter")
