"""What a folder brings besides safetensors: pickle files, code, adapters, others' parts."""

import json
from fnmatch import fnmatch

import pytest
import torch

from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Dense, Encoder, ModelError
from tests import models

pytest.importorskip("transformers")
TEXTS = models.texts()


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("pickle", [False, True])
def test_what_is_fetched_from_the_hub(trust, pickle, tmp_path, monkeypatch):
    """Code and pickled weights only where they are asked for; of an adapter's base the same."""
    import huggingface_hub

    asked = []

    def fetched(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return models.tiny_bert()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    flags = {"trust_remote_code": trust, "allow_pickle": pickle}
    Encoder.from_pretrained("no/such-model", **flags)
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.add_lora(2)
    encoder.model.save_pretrained(tmp_path / "adapter")
    models.edit(tmp_path / "adapter/adapter_config.json", base_model_name_or_path="no/such-base")
    Encoder.from_pretrained(tmp_path / "adapter", **flags)
    assert [name for name, _ in asked] == ["no/such-model", "no/such-base"]
    for _, patterns in asked:
        wanted = {"model.safetensors", "1_Pooling/config.json", "spiece.model", "merges.txt"}
        wanted |= {"chat_template.jinja"}
        wanted |= {"modeling.py"} if trust else set()
        wanted |= {"pytorch_model.bin"} if pickle else set()
        files = [*wanted, "modeling.py", "pytorch_model.bin", "tf_model.h5", "model.onnx"]
        assert {f for f in files if any(fnmatch(f, one) for one in patterns)} == wanted


@pytest.mark.parametrize("trust", [False, True])
def test_transformers_is_told_whether_code_may_be_run(trust, monkeypatch):
    import transformers

    told = set()
    for name in ("AutoTokenizer", "AutoConfig", "AutoModel"):
        kind = getattr(transformers, name)

        def loaded(*given, load=kind.from_pretrained, name=name, **options):
            told.add((name, options.get("trust_remote_code")))
            return load(*given, **options)

        monkeypatch.setattr(kind, "from_pretrained", loaded)
    Encoder.from_pretrained(models.tiny_bert(), trust_remote_code=trust)
    assert told == {(name, trust) for name in ("AutoTokenizer", "AutoConfig", "AutoModel")}


def test_pickled_weights_need_a_flag(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(encoder.model.state_dict(), tmp_path / "model/pytorch_model.bin")
    missing = r"model' has no model.safetensors; allow_pickle=True \(--allow-pickle\)"
    with pytest.raises(ModelError, match=missing):
        Encoder.from_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_pickled_weights_of_a_dense_layer_need_the_flag_too(tmp_path):
    """What they hold besides tensors is not run even then."""
    encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
    encoder.save_pretrained(tmp_path / "model")
    place = tmp_path / "model/2_Dense"
    (place / "pytorch_model.bin").write_text("not read beside the other")
    Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    (place / "pytorch_model.bin").unlink()
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense' has neither .* nor pytorch_model.bin"):
        Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    torch.save(encoder.head[0].state_dict(), place / "pytorch_model.bin")
    missing = r"2_Dense' has no model.safetensors; allow_pickle=True \(--allow-pickle\)"
    with pytest.raises(ModelError, match=missing):
        Encoder.from_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=missing):
        CrossEncoder.from_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))
    CrossEncoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    torch.save({"linear.weight": Dense}, place / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"2_Dense.pytorch_model.bin' cannot be loaded"):
        Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)


def test_an_adapter_brings_its_own_tokenizer(tmp_path):
    """As in sentence-transformers; without one it has that of its base."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.add_lora(2)
    encoder.model.save_pretrained(tmp_path / "adapter")
    models.edit(
        tmp_path / "adapter/adapter_config.json",
        base_model_name_or_path=str(models.tiny_bert()),
    )
    expected = encoder.tokenize(TEXTS)["input_ids"]
    assert torch.equal(
        Encoder.from_pretrained(tmp_path / "adapter").tokenize(TEXTS)["input_ids"], expected
    )
    encoder.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", encoder.tokenizer.sep_token_id)]
    )
    encoder.tokenizer.model_max_length = 7
    encoder.tokenizer.save_pretrained(tmp_path / "adapter")
    again = Encoder.from_pretrained(tmp_path / "adapter")
    assert again.max_length == 7
    own = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    wanted = own(TEXTS, padding=True, truncation=True, return_tensors="pt")["input_ids"]
    found = again.tokenize(TEXTS)["input_ids"]
    assert torch.equal(found, wanted)
    assert found.shape != expected.shape


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_another_library_is_none_of_ours(place, tmp_path):
    """Its name may be that of one of sentence-transformers, what it does is not known."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path)
    rows = json.loads((tmp_path / "modules.json").read_text())
    rows[place]["type"] = f"my_library.{rows[place]['type']}"
    (tmp_path / "modules.json").write_text(json.dumps(rows))
    with pytest.raises(ModelError, match=rf"wanted the parts .*, got '{rows[place]['type']}'"):
        Encoder.from_pretrained(tmp_path)


def test_a_cross_encoder_begins_with_the_transformer_of_pylate(tmp_path):
    """Its dense layer is one of tokens, so that the folder is no encoder's."""
    Encoder.from_pretrained(models.tiny_bert(), dense=4).save_pretrained(tmp_path)
    rows = json.loads((tmp_path / "modules.json").read_text())
    rows[2]["type"] = "pylate.models.Dense.Dense"
    (tmp_path / "modules.json").write_text(json.dumps([rows[0], rows[2]]))
    CrossEncoder.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"got 'pylate.models.Dense.Dense' in"):
        Encoder.from_pretrained(tmp_path)


def test_code_in_a_folder_is_not_run(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (tmp_path / "model/code.py").write_text(code)
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    models.edit(tmp_path / "model/config.json", auto_map=names, model_type="of-its-own")
    with pytest.raises(ModelError):
        Encoder.from_pretrained(tmp_path / "model")
    assert not mark.exists()
