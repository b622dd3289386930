"""What an encoder and its parts are given is refused by name."""

import numpy as np
import pytest
import torch

from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Dense, Encoder
from fastsim.encoders.parts import ACTIVATIONS
from tests import models

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def encoder():
    return Encoder.from_pretrained(models.tiny_bert())


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"texts": None}, TypeError, "texts: wanted a list of str, got NoneType"),
        ({"batch_size": "x"}, TypeError, "batch_size: wanted an int, got str"),
        ({"batch_size": 1.5}, TypeError, "batch_size: wanted an int, got float"),
        ({"batch_size": True}, TypeError, "batch_size: wanted an int, got bool"),
        ({"prompt": 3}, TypeError, "prompt: wanted a str, got int"),
        ({"normalize": "no"}, ValueError, "normalize: wanted one of False, True, got 'no'"),
        ({"to_numpy": "no"}, ValueError, "to_numpy: wanted one of False, True, got 'no'"),
        ({"progress": "no"}, ValueError, "progress: wanted one of None, False, True, got 'no'"),
        ({"dtype": "float16"}, ValueError, r"dtype: wanted one of torch.float16, .* got 'float16'"),
        ({"dtype": torch.int8}, ValueError, r"dtype: wanted one of .* got torch.int8"),
        ({"devices": 3}, TypeError, "devices: wanted a list of device names, got int"),
        ({"devices": "cpu"}, TypeError, "devices: wanted a list of device names, got one str"),
        ({"devices": [0]}, TypeError, "devices: wanted a list of device names, got int in it"),
        ({"devices": []}, ValueError, r"devices: wanted .* at least one device name, got \[\]"),
        ({"devices": ["gpu"]}, ValueError, "devices: wanted devices of this machine, .* 'gpu'"),
        ({"devices": ["cuda:99"]}, ValueError, "devices: wanted devices .* got 'cuda:99'"),
        ({"devices": ["meta"]}, ValueError, "devices: wanted devices of this .* got 'meta'"),
        ({"truncate_dim": True}, TypeError, "truncate_dim: wanted an int, got bool"),
        ({"truncate_dim": "x"}, TypeError, "truncate_dim: wanted an int, got str"),
        ({"truncate_dim": -1}, ValueError, "truncate_dim: wanted at least 1, got -1"),
    ],
)
def test_encode(encoder, options, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        encoder.encode(**{"texts": ["a", "b"], **options})


def test_integers_of_numpy_are_ints(encoder):
    texts, four = ["a", "b", "the"], np.int64(4)
    assert encoder.encode(texts, batch_size=np.int32(2), truncate_dim=four).shape == (3, 4)
    short = Encoder(encoder.model, encoder.tokenizer, max_length=four, head=[Dense(32, four)])
    assert short.encode(texts).shape == (3, 4)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"model": 3}, TypeError, "model: wanted a transformers model, got int"),
        ({"tokenizer": None}, TypeError, "tokenizer: wanted a tokenizer, got NoneType"),
        ({"pooling": ["mean"]}, ValueError, r"pooling: wanted one of 'mean', .* got \['mean'\]"),
        ({"head": 3}, TypeError, "head: wanted a list of Dense or Normalize, got int"),
        ({"head": [Dense(31, 4)]}, ValueError, r"head\[0\]: wanted 32 in_features, .* got 31"),
        (
            {"head": [Dense(32, 4), Dense(32, 4)]},
            ValueError,
            r"head\[1\]: wanted 4 in_features, .* got 32",
        ),
        ({"max_length": 12.5}, TypeError, "max_length: wanted an int, got float"),
        ({"max_length": True}, TypeError, "max_length: wanted an int, got bool"),
        ({"lower_case": "no"}, ValueError, "lower_case: wanted one of False, True, got 'no'"),
        ({"include_prompt": 2}, ValueError, "include_prompt: wanted one of False, True, got 2"),
        ({"prompts": "q"}, TypeError, r"prompts: wanted {name: text}, got str"),
        ({"prompts": {"q": 3}}, TypeError, r"prompts\['q'\]: wanted a str, got int"),
        ({"prompts": {3: "q"}}, TypeError, "a name in prompts: wanted a str, got int"),
        ({"default_prompt": ["q"]}, ValueError, r"default_prompt: wanted a name .* got \['q'\]"),
        ({"similarity": ["dot"]}, ValueError, r"similarity: wanted one of .* got \['dot'\]"),
        ({"truncate_dim": True}, TypeError, "truncate_dim: wanted an int, got bool"),
    ],
)
def test_an_encoder(encoder, options, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        Encoder(**{"model": encoder.model, "tokenizer": encoder.tokenizer, **options})


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"name": None}, TypeError, "model: wanted a str or a path, got NoneType"),
        ({"name": 0}, TypeError, "model: wanted a str or a path, got int"),
        ({"pooling": "x"}, ValueError, "pooling: wanted one of 'mean', .* got 'x'"),
        ({"dense": 0}, ValueError, "dense: wanted at least 1, got 0"),
        ({"dense": "x"}, TypeError, "dense: wanted an int, got str"),
        ({"dense": True}, TypeError, "dense: wanted an int, got bool"),
        ({"max_length": "x"}, TypeError, "max_length: wanted an int, got str"),
        ({"allow_pickle": "no"}, ValueError, "allow_pickle: wanted one of False, True, got 'no'"),
        ({"trust_remote_code": "no"}, ValueError, "trust_remote_code: wanted one of False, True"),
    ],
)
def test_from_pretrained(options, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        Encoder.from_pretrained(**{"name": models.tiny_bert(), **options})
    if not {"pooling", "dense"} & set(options):
        with pytest.raises(kind, match=f"^{said}"):
            CrossEncoder.from_pretrained(**{"name": models.tiny_bert(), **options})


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda e: e.tokenize("text"), TypeError, "texts: wanted a list of str, got one str"),
        (lambda e: e.tokenize(["a"], 3), TypeError, "prompt: wanted a str, got int"),
        (lambda e: e.prompt_name(3), TypeError, "part: wanted a str, got int"),
        (lambda e: e.save_pretrained(None), TypeError, "path: wanted a str or a path, got None"),
        (lambda e: e.add_lora("x"), TypeError, "rank: wanted an int, got str"),
        (lambda e: e.add_lora(0), ValueError, "rank: wanted at least 1, got 0"),
        (lambda e: e.add_lora(2, scale="x"), TypeError, "scale: wanted a number, got str"),
        (lambda e: e.add_lora(2, scale=0.0), ValueError, "scale: wanted a positive finite number"),
    ],
)
def test_methods(encoder, call, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        call(encoder)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((0, 3), {}, ValueError, "in_features: wanted at least 1, got 0"),
        ((2, "x"), {}, TypeError, "out_features: wanted an int, got str"),
        ((2, 0), {}, ValueError, "out_features: wanted at least 1, got 0"),
        ((2, 3), {"bias": "no"}, ValueError, "bias: wanted one of False, True, got 'no'"),
        *(
            ((2, 3), {"activation": name}, ValueError, "activation: wanted one of 'CELU', .* got")
            for name in ("Module", "MultiheadAttention", "GLU", "PReLU", "Softmax2d", "tanh", 3)
        ),
    ],
)
def test_a_dense_layer(arguments, options, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        Dense(*arguments, **options)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_the_shape_and_have_no_weights(name):
    dense = Dense(2, 3, activation=name)
    assert type(dense.activation).__name__ == name
    assert dense(torch.ones(4, 2)).shape == (4, 3)
    assert {key.split(".")[0] for key in dense.state_dict()} == {"linear"}
