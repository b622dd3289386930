"""The encoder: what `encode` gives and leaves as it was."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fastsim
from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import POOLINGS, Encoder
from fastsim.encoders.parts import Dense, Normalize
from tests import models
from tests.encoders.close import assert_alone, one_by_one, rounding, wide
from tests.measure import assert_close

pytest.importorskip("transformers")
TEXTS = models.texts()


def test_encode_returns_the_given_order():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    shuffled = [TEXTS[i] for i in torch.randperm(len(TEXTS)).tolist()]
    assert_alone(encoder.encode(shuffled, batch_size=7), encoder, shuffled)


@pytest.mark.parametrize("mode", [True, False])
def test_encode_leaves_the_mode_and_has_no_gradient(mode):
    encoder = Encoder.from_pretrained(models.tiny_bert()).train(mode)
    first, second = encoder.encode(TEXTS[:3]), encoder.encode(TEXTS[:3])
    assert encoder.training == encoder.model.training == mode
    assert not first.requires_grad
    assert torch.equal(first, second)  # no dropout
    assert encoder.encode([]).shape == (0, 32)
    norms = encoder.encode(TEXTS[:3], normalize=True).double().norm(dim=1)
    # A square and a sum for each of 32 numbers, the root and the division.
    assert ((norms - 1).abs() <= (2 * 32 + 2) * torch.finfo(torch.float32).eps).all()


def test_a_model_that_is_loaded_is_in_one_mode():
    """That of evaluation, before and after it is used: without dropout."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    cross = CrossEncoder.from_pretrained(models.tiny_bert())
    for model, use in ((encoder, encoder.encode), (cross, lambda texts: cross.score(texts, texts))):
        assert {module.training for module in model.modules()} == {False}
        use(TEXTS[:2])
        assert {module.training for module in model.modules()} == {False}
    encoder.model.train()
    again = Encoder(encoder.model, encoder.tokenizer, head=encoder.head)
    assert {module.training for module in again.modules()} == {True}


def test_encode_checks_at_the_door():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    with pytest.raises(TypeError, match="texts: wanted a list of str"):
        encoder.encode("one text")
    with pytest.raises(TypeError, match="texts: wanted a list of str, got NoneType in it"):
        encoder.encode(["a", None])
    assert torch.equal(encoder.encode(text for text in "ab"), encoder.encode(["a", "b"]))
    with pytest.raises(ValueError, match="batch_size: wanted at least 1, got 0"):
        encoder.encode(["a"], batch_size=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_without_a_token_gives_zero(pooling):
    """Alone as beside others, where the tokenizer adds no token of its own."""
    encoder = Encoder.from_pretrained(models.tiny_decoder(), pooling=pooling)
    assert encoder.encode(["", ""]).eq(0).all()
    beside = encoder.encode(["", TEXTS[0]])
    assert beside[0].eq(0).all()
    assert beside[1].ne(0).any()


def test_an_encoder_checks_its_parts():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    parts = encoder.model, encoder.tokenizer
    with pytest.raises(TypeError, match="head: wanted a list of Dense or Normalize, got ReLU in"):
        Encoder(*parts, head=[torch.nn.ReLU()])
    with pytest.raises(ValueError, match="default_prompt: wanted a name in prompts, got 'q'"):
        Encoder(*parts, prompts={"query": "q"}, default_prompt="q")
    encoder.tokenizer.pad_token = encoder.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: wanted one with a padding or an end"):
        Encoder(*parts)
    assert Encoder.from_pretrained(models.tiny_bert()).include_prompt


@pytest.mark.parametrize("progress", [None, True, False])
def test_a_bar_is_shown_on_a_terminal_of_several_batches(progress, capsys, monkeypatch):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for batch_size, several in ((4, False), (2, True)):
            encoder.encode(TEXTS[:4], batch_size=batch_size, progress=progress)
            shown = terminal and several if progress is None else progress
            assert ("encode: 100%" in capsys.readouterr().err) == shown


def test_encode_in_several_processes_is_encode_in_one():
    encoder = Encoder.from_pretrained(models.tiny_bert(), max_length=32).train()
    encoder.prompts["query"] = "the question : "
    options = {"batch_size": 3, "prompt": "query", "normalize": True}
    several = encoder.encode(TEXTS, **options, devices=["cpu", "cpu"])
    assert_alone(several, encoder, TEXTS, prompt="query", normalize=True)
    assert encoder.training


def test_processes_return_all_bits_of_what_they_found():
    single = Encoder.from_pretrained(models.tiny_bert())
    double, options = wide(single), {"dtype": torch.float64}
    alone = double.encode(TEXTS[:4], **options)
    several = double.encode(TEXTS[:4], **options, devices=["cpu"])
    # Either has at most about as many roundings of its type as the float32 encoder has of its own.
    most = 2 * rounding(single.encode(TEXTS[:4]), alone)
    assert rounding(several, alone) <= 2 * most  # of other threads: not the same bits


def test_encode_to_numpy_and_in_half_precision():
    encoder = Encoder.from_pretrained(models.tiny_bert())
    whole = encoder.encode(TEXTS)
    half = encoder.encode(TEXTS, dtype=torch.float16, to_numpy=True)
    assert (type(half).__name__, half.dtype.name) == ("ndarray", "float16")
    assert torch.equal(torch.from_numpy(half), whole.half())
    unit = encoder.encode(TEXTS, dtype=torch.float16, normalize=True)
    assert torch.equal(unit, torch.nn.functional.normalize(whole).half())
    with pytest.raises(ValueError, match="dtype: wanted a dtype of numpy"):
        encoder.encode(TEXTS, dtype=torch.bfloat16, to_numpy=True)
    truth = means(wide(encoder))
    computed = encoder.bfloat16().encode(TEXTS)
    assert computed.dtype == torch.float32
    assert not torch.equal(computed, whole)
    assert_close("embeddings", computed, truth, means(encoder), torch.bfloat16, independent=True)


def means(encoder):
    """Of the states that the transformer itself gives for each text alone."""
    states = []
    for text in TEXTS:
        with torch.no_grad():
            states.append(encoder.model(**encoder.tokenizer(text, return_tensors="pt"))[0])
    wider = torch.promote_types(states[0].dtype, torch.float32)
    return torch.cat([each.to(wider).mean(1) for each in states])


def test_a_head_has_the_dtype_of_the_weights():
    plain = Encoder.from_pretrained(models.tiny_bert())
    encoder = Encoder(plain.model, plain.tokenizer, head=[Dense(32, 8), Normalize()])

    def through_head(encoder):
        linear = encoder.head[0].linear
        found = linear(means(encoder).to(linear.weight.dtype)).tanh().detach()
        return found / found.norm(dim=1, keepdim=True)

    truth, whole = through_head(wide(encoder)), encoder.encode(TEXTS)
    found = encoder.bfloat16().encode(TEXTS)
    assert not torch.equal(found, whole)
    assert_close(
        "embeddings", found, truth, through_head(encoder), torch.bfloat16, independent=True
    )


def test_imports_stay_light():
    code = (
        "import sys, fastsim, fastsim.cli.main, fastsim.encoders.encoder\n"
        "heavy = {'transformers', 'datasets', 'matplotlib', 'scipy', 'accelerate', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_roberta_counts_its_own_positions():
    """From the number of its padding on, on whichever side this is."""
    import transformers

    tokenizer = Encoder.from_pretrained(models.tiny_bert()).tokenizer
    tokenizer.padding_side = "left"
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    encoder = Encoder(transformers.RobertaModel(config), tokenizer).eval()
    truth = means(wide(encoder))
    assert_close("embeddings", encoder.encode(TEXTS), truth, means(encoder), torch.float32)


# Of RoBERTa and its kin the first position is after that of the padding; all have 34 positions.
@pytest.mark.parametrize(
    ("kind", "padding", "most"),
    [
        ("Roberta", 1, 32),
        ("Roberta", 0, 33),
        ("MPNet", 1, 32),
        ("Camembert", 3, 30),
        ("Bert", 1, 34),
    ],
)
def test_a_text_is_no_longer_than_the_positions(kind, padding, most):
    import transformers

    tokenizer = Encoder.from_pretrained(models.tiny_bert()).tokenizer
    tokenizer.model_max_length = 10**30
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        pad_token_id=padding,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=34,
    )
    model = getattr(transformers, f"{kind}Model")(config)
    encoder = Encoder(model, tokenizer)
    assert encoder.max_length == most
    assert encoder.encode(["the " * 99]).isfinite().all()
    with pytest.raises(ValueError, match=f"max_length: wanted 3 to {most} tokens, got {most + 1}"):
        Encoder(model, tokenizer, max_length=most + 1)


def test_a_decoder_is_pooled_at_its_last_token():
    assert Encoder.from_pretrained(models.tiny_decoder()).pooling == "last"
    assert Encoder.from_pretrained(models.tiny_bert()).pooling == "mean"


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
    texts = TEXTS[:8], TEXTS[8:16]
    dense = loss(*map(ours.encode, texts))
    sides = [one_by_one(wide(ours), part, dtype=torch.float64).requires_grad_() for part in texts]
    truth = loss(*sides)
    truth.backward()
    # What errors of the embeddings as large as the encoder's own do to the loss.
    moved = 0.0
    for part, side in zip(texts, sides, strict=True):
        error = (ours.encode(part) - side.detach()).abs().max()
        moved += (error * side.grad.abs()).sum().item()
    both = truth.detach().expand(2), dense.expand(2)
    assert_close("loss", torch.stack(found), *both, torch.float32, moved=moved)
    with pytest.raises(
        TypeError, match=r"columns\[0\]: wanted what the forward of Linear takes, got texts"
    ):
        GradCache(torch.nn.Linear(2, 2), loss, micro_batch_size=2).backward(["a", "b"])


def test_a_text_has_room_beside_the_special_tokens():
    """Told to cut below these, a tokenizer cuts nothing."""
    texts = models.texts(5)
    short = Encoder.from_pretrained(models.tiny_bert(), max_length=3)
    assert short.tokenize(texts)["input_ids"].shape == (5, 3)
    for length in (1, 2, 65):
        with pytest.raises(ValueError, match=f"max_length: wanted 3 to 64 tokens, got {length}"):
            Encoder.from_pretrained(models.tiny_bert(), max_length=length)
    with pytest.raises(ValueError, match="max_length: wanted 5 to 64 tokens, got 4"):
        CrossEncoder.from_pretrained(models.tiny_bert(), max_length=4)


@pytest.mark.parametrize("said", [{}, {"max_position_embeddings": -1},
                                  {"max_position_embeddings": None}])  # fmt: skip
def test_a_model_that_says_no_length_has_none(said):
    """As one with relative positions, whose tokenizer was saved without a length; XLNet's -1."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.tokenizer.model_max_length = 10**30
    encoder.model.config = SimpleNamespace(hidden_size=32, **said)
    encoder = Encoder(encoder.model, encoder.tokenizer)
    assert encoder.max_length is None
    assert encoder.tokenize(["the " * 99])["input_ids"].shape == (1, 101)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("folder", [models.tiny_bert, models.tiny_decoder])
def test_no_texts_have_no_embeddings(folder, pooling):
    """As on one rank of a group, where they still depend on all weights that texts depend on."""
    encoder = Encoder.from_pretrained(folder(), pooling=pooling, dense=5).train()
    encoder.include_prompt = False
    features = encoder.tokenize([], "the ")
    assert features.keys() == encoder.tokenize(["a"], "the ").keys()
    assert {len(part) for part in features.values()} == {0}
    learning = []
    for texts in ([], ["the cat"]):
        encoder.zero_grad()
        vectors = encoder(encoder.tokenize(texts))
        assert vectors.shape == (len(texts), 5)
        vectors.sum().backward()
        learning.append({n: p.grad for n, p in encoder.named_parameters() if p.grad is not None})
    assert learning[0].keys() == learning[1].keys()
    assert not any(grad.any() for grad in learning[0].values())
