"""The embeddings of a corpus in a file, used again while the texts and the model are the same."""

import hashlib
import json
import tempfile
from pathlib import Path

import torch

from fastsim.files import OutputError, check_new_file, whole_file
from fastsim.training.evaluation import check_vectors

_KIND = "fastsim-index-2"
_FAMILY = "fastsim-index-"  # of every version
_OTHER = {"texts": "of other texts", "model": "by another model or prompt"}
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


def indexed(encoder, texts, path, *, batch_size=32, overwrite=False):
    """Embeddings (N, encoded_dim) of the texts: those of the file, or new ones that it holds then.

    path: of a file in the format of safetensors. overwrite: whether an index of other texts or by
    another model may be replaced, which is an `OutputError` otherwise. ValueError where the path
    holds something else.
    """
    from safetensors.torch import save_file

    path = Path(path)
    wanted = {"kind": _KIND, "texts": texts_key(texts), "model": model_key(encoder)}
    if path.exists():
        about, vectors = _read(path)
        if about == wanted:
            return vectors
        if not overwrite:
            raise OutputError(
                f"index: {str(path)!r} is {_difference(about, wanted)}; --overwrite replaces it"
            )
    check_new_file("index", path)
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    with whole_file(path) as part:
        save_file({"vectors": vectors}, part, metadata=wanted)
    return vectors


def _read(path):
    """(what an index says of itself, its vectors, None of another version), or ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("kind") == _KIND:
                return about, file.get_tensor("vectors")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"index: {str(path)!r} is not a fastsim index") from error
    if not about.get("kind", "").startswith(_FAMILY):
        raise ValueError(f"index: {str(path)!r} is not a fastsim index")
    return about, None


def _difference(about, wanted):
    """What an index is that was not wanted, in words."""
    if about["kind"] != wanted["kind"]:
        return "of another version of fastsim"
    return " and ".join(said for name, said in _OTHER.items() if about.get(name) != wanted[name])


def texts_key(texts):
    """A hash of the texts, in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def model_key(encoder):
    """A hash of all that decides the embeddings of documents beside their texts."""
    digest = hashlib.sha256()
    parts = (encoder.pooling, encoder.max_length, encoder.lower_case, encoder.include_prompt)
    for part in (*parts, encoder.truncate_dim):
        digest.update(repr(part).encode() + b"\0")
    digest.update(repr(encoder.head).encode())  # activations have no weights
    digest.update(repr(encoder.prompt_of_column("document")).encode())
    digest.update(_without(encoder.model.config.to_json_string(), _OF_FILES))
    for part in _tokenizer_state(encoder.tokenizer):
        digest.update(hashlib.sha256(part).digest())
    for name, value in encoder.state_dict().items():
        digest.update(f"{name} {value.dtype}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
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
