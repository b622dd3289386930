"""What a folder says of its transformer: against sentence-transformers' own files, and refused."""

import json

import pytest

from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Encoder, ModelError
from fastsim.encoders.transformer_config import transformer_settings
from tests import models
from tests.encoders.close import assert_theirs

pytest.importorskip("transformers")
TEXTS = models.texts()
FILE = "sentence_bert_config.json"
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


@pytest.fixture
def theirs(tmp_path):
    """A model of sentence-transformers, of a plain folder."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(models.tiny_bert()), device="cpu")


def written(model, folder, **changes):
    """The folder that sentence-transformers writes of a model with other attributes."""
    for name, value in changes.items():
        setattr(model[0], name, value)
    model.save_pretrained(str(folder))
    return folder


def test_what_sentence_transformers_writes_by_itself_is_read(theirs, tmp_path):
    folder = written(theirs, tmp_path / "model")
    assert_theirs(Encoder.from_pretrained(folder).encode(TEXTS), theirs, TEXTS)
    CrossEncoder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("query_length", 5, "query_length: wanted none, .* got 5"),
        ("document_length", 8, "document_length: wanted none, .* got 8"),
        (
            "processing_kwargs",
            {"text": {"max_length": 6, "truncation": True}},
            r"processing_kwargs\['text'\]: wanted none, .* got {'max_length': 6",
        ),
        (
            "query_expansion",
            {"strategy": "fixed", "attend": True, "length": 32},
            "query_expansion: wanted none, .* got {'strategy': 'fixed'",
        ),
    ],
)
def test_what_would_change_embeddings_is_refused(key, value, said, theirs, tmp_path):
    """From the file that sentence-transformers itself writes of it."""
    folder = written(theirs, tmp_path / "model", **{key: value})
    for kind in (Encoder, CrossEncoder):
        with pytest.raises(ModelError, match=rf"{FILE}' cannot be loaded: ValueError: {said}"):
            kind.from_pretrained(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"max_seq_length": 9, "do_lower_case": True},
        {"transformer_task": "feature-extraction", "modality_config": TEXT},
        {"modality_config": TEXT | {"image": {"method": "get_image_features"}}},
        {"module_output_name": "token_embeddings", "unpad_inputs": False},
        {"query_length": None, "document_length": None, "query_expansion": None},
        {"model_args": {"attn_implementation": "eager", "torch_dtype": "bfloat16"}},
        {"model_kwargs": {"dtype": "float16", "revision": "main"}, "config_kwargs": {}},
        {"model_args": {"trust_remote_code": True}, "tokenizer_args": {"use_fast": False}},
        {"processing_kwargs": {"text": {}, "image": {"size": 3}}, "processor_kwargs": None},
        {"cache_dir": "a", "tokenizer_name_or_path": None, "backend": "torch"},
        {"tokenizer_name_or_path": "", "of_a_later_version": [], "config_args": {"layers": []}},
    ],
)
def test_what_changes_nothing_is_read(config):
    wanted = {"max_length": config.get("max_seq_length")}
    wanted |= {"lower_case": config.get("do_lower_case", False)}
    assert transformer_settings(config) == wanted


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_args": {"output_hidden_states": True}}, r"model_args\['output_hidden_states'\]: "),
        ({"model_kwargs": {"quantization_config": {"a": 1}}}, r"model_kwargs\['quantization_conf"),
        ({"tokenizer_args": {"padding_side": "left"}}, r"tokenizer_args\['padding_side'\]: "),
        (
            {"processor_kwargs": {"model_max_length": 5}},
            r"processor_kwargs\['model_max_length'\]: ",
        ),
        ({"config_kwargs": {"num_hidden_layers": 1}}, r"config_kwargs\['num_hidden_layers'\]: "),
        ({"config_args": 3}, "config_args: wanted none, .* got 3"),
        ({"processing_kwargs": {"common": {"padding": False}}}, r"processing_kwargs\['common'\]: "),
        ({"tokenizer_name_or_path": "x"}, "tokenizer_name_or_path: wanted none, .* got 'x'"),
        ({"of_a_later_version": 1}, "of_a_later_version: wanted none, .* got 1"),
        ({"transformer_task": "fill-mask"}, "transformer_task: wanted one of None, .* 'fill-mask'"),
        ({"transformer_task": "sequence-classification"}, "transformer_task: wanted one of None"),
        ({"module_output_name": "scores"}, "module_output_name: wanted one of None, .* 'scores'"),
        ({"modality_config": 3}, "modality_config: wanted no 'message', .* got 3"),
        ({"modality_config": {}}, "modality_config: wanted no 'message', .* got {}"),
        ({"modality_config": TEXT | {"message": {}}}, "modality_config: wanted no 'message'"),
        (
            {"modality_config": {"text": TEXT["text"] | {"method": "get_text_features"}}},
            "modality_config: wanted .* got .*get_text_features",
        ),
    ],
)
def test_other_values_are_refused_by_their_key(config, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        transformer_settings(config)


def test_a_transformer_of_scores_is_read_where_scores_are_wanted():
    config = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    config["modality_config"] = {"text": {"method": "forward", "method_output_name": "logits"}}
    assert transformer_settings(config, scores=True) == {"max_length": None, "lower_case": False}
    with pytest.raises(ValueError, match=r"modality_config: wanted .*'logits'"):
        transformer_settings(config | {"modality_config": TEXT}, scores=True)


def test_messages_of_a_chat_template_are_refused(tmp_path):
    """sentence-transformers makes each text a message of such a tokenizer, and says so."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.model.save_pretrained(tmp_path / "plain")
    encoder.tokenizer.chat_template = "{% for m in messages %}the {{ m['content'] }}{% endfor %}"
    encoder.tokenizer.save_pretrained(tmp_path / "plain")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "model"))
    assert "message" in json.loads((tmp_path / "model" / FILE).read_text())["modality_config"]
    with pytest.raises(ModelError, match=f"{FILE}' .* modality_config: wanted no 'message'"):
        Encoder.from_pretrained(tmp_path / "model")
