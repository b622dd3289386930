"""The embeddings of a corpus in a file, used again while the texts and the model are the same."""

import hashlib
import json
import tempfile
from pathlib import Path

import torch

from fastsim.files import check_new_file, whole_file
from fastsim.training.evaluation import check_vectors

_KIND = "fastsim-index-1"
# In the configuration of a transformer, and nothing of what it computes.
_OF_FILES = ("_name_or_path", "architectures", "dtype", "transformers_version")
# In the files of a tokenizer: where it was, and how it was called last, which every call says anew.
_OF_CALLS = (
    "name_or_path",
    "is_local",
    "local_files_only",
    "truncation",
    "truncation_strategy",
    "max_length",
    "stride",
    "padding",
    "pad_to_multiple_of",
    "pad_token_type_id",
)
_SIDES = ("truncation_side", "padding_side")  # in the files only after a call


def indexed(encoder, texts, path, *, batch_size=32):
    """Embeddings (N, encoded_dim) of the texts: those of the file, or new ones that it holds then.

    path: a .safetensors file. ValueError where the path holds something else.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    path, key = Path(path), index_key(encoder, texts)
    if path.exists():
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("kind") != _KIND:
                    raise ValueError(f"index: {str(path)!r} is not a fastsim index")
                if about["key"] == key:
                    return file.get_tensor("vectors")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"index: {str(path)!r} is not a fastsim index") from error
    check_new_file("index", path)
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    with whole_file(path) as part:
        save_file({"vectors": vectors}, part, metadata={"kind": _KIND, "key": key})
    return vectors


def index_key(encoder, texts):
    """A hash of the texts and of all that decides their embeddings."""
    digest = hashlib.sha256()
    parts = (encoder.pooling, encoder.max_length, encoder.lower_case, encoder.include_prompt)
    for part in (*parts, encoder.truncate_dim):
        digest.update(repr(part).encode() + b"\0")
    digest.update(repr(encoder.head).encode())  # activations have no weights
    digest.update(repr((sorted(encoder.prompts.items()), encoder.default_prompt)).encode())
    digest.update(_without(encoder.model.config.to_json_string(), _OF_FILES))
    for part in _tokenizer_state(encoder.tokenizer):
        digest.update(hashlib.sha256(part).digest())
    for name, value in encoder.state_dict().items():
        digest.update(f"{name} {value.dtype}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _tokenizer_state(tokenizer):
    """All that decides a tokenizer's tokens, in bytes: the files that it writes, and its sides."""
    yield repr([getattr(tokenizer, side, None) for side in _SIDES]).encode()
    with tempfile.TemporaryDirectory(prefix="fastsim-") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            settings = file.name in ("tokenizer.json", "tokenizer_config.json")
            text = file.read_bytes()
            yield file.name.encode()
            yield _without(text, (*_OF_CALLS, *_SIDES)) if settings else text


def _without(text, names):
    """A JSON object without some of its entries, in bytes that are the same for the same object."""
    found = {name: value for name, value in json.loads(text).items() if name not in names}
    return json.dumps(found, sort_keys=True).encode()
