"""The embeddings of a corpus in a file, reused while the texts and the model stay the same."""

import hashlib
import json
import tempfile
from pathlib import Path

import torch

from fastsim.files import OutputError, check_new_file, whole_file
from fastsim.training.evaluation import check_vectors

_KIND = "fastsim-index-2"
_KINDS = "fastsim-index-"  # the prefix of all versions
_OTHER = {"texts": "of other texts", "model": "by another model or prompt"}
# Settings in the configuration of a transformer that do not change what it computes.
_CONFIG_IGNORED = ("_name_or_path", "architectures", "dtype", "transformers_version")
# Settings in the files of a tokenizer that do not change its tokens: its location, and the
# arguments of the last call, which every call sets anew.
_TOKENIZER_IGNORED = (
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
_SIDES = ("truncation_side", "padding_side")  # settings that the files have only after a call


def load_or_encode(encoder, texts, path, *, batch_size=32, overwrite=False):
    """Embeddings (N, encoded_dim) of the texts, loaded from the file or encoded and saved there.

    path: a safetensors file. overwrite: whether to replace an index of other texts or by another
    model, which otherwise raises `OutputError`. ValueError if the file is not an index.
    """
    from safetensors.torch import save_file

    path = Path(path)
    metadata = {"kind": _KIND, "texts": texts_key(texts), "model": model_key(encoder)}
    if path.exists():
        existing, vectors = _read(path)
        if existing == metadata:
            return vectors
        if not overwrite:
            difference = _difference(existing, metadata)
            raise OutputError(f"index: {str(path)!r} is {difference}; --overwrite replaces it")
    check_new_file("index", path)
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    with whole_file(path) as part:
        save_file({"vectors": vectors}, part, metadata=metadata)
    return vectors


def _read(path):
    """(metadata of an index, its vectors or None for another version); ValueError if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") == _KIND:
                return metadata, file.get_tensor("vectors")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"index: {str(path)!r} is not a fastsim index") from error
    if not metadata.get("kind", "").startswith(_KINDS):
        raise ValueError(f"index: {str(path)!r} is not a fastsim index")
    return metadata, None


def _difference(existing, metadata):
    """How the metadata of an existing index differs, in words."""
    if existing["kind"] != metadata["kind"]:
        return "of another version of fastsim"
    return " and ".join(
        words for name, words in _OTHER.items() if existing.get(name) != metadata[name]
    )


def texts_key(texts):
    """A hash of the texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def model_key(encoder):
    """A hash of everything except their texts that determines the embeddings of documents."""
    digest = hashlib.sha256()
    parts = (encoder.pooling, encoder.max_length, encoder.lower_case, encoder.include_prompt)
    for part in (*parts, encoder.truncate_dim):
        digest.update(repr(part).encode() + b"\0")
    digest.update(repr(encoder.head).encode())  # activations have no weights
    digest.update(repr(encoder.prompt_of_column("document")).encode())
    digest.update(_without(encoder.model.config.to_json_string(), _CONFIG_IGNORED))
    for part in _tokenizer_state(encoder.tokenizer):
        digest.update(hashlib.sha256(part).digest())
    for name, value in encoder.state_dict().items():
        digest.update(f"{name} {value.dtype}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tokenizer_state(tokenizer):
    """Everything that determines the tokens, as bytes: the tokenizer's files, and its sides."""
    yield repr([getattr(tokenizer, side, None) for side in _SIDES]).encode()
    with tempfile.TemporaryDirectory(prefix="fastsim-") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            settings = file.name in ("tokenizer.json", "tokenizer_config.json")
            text = file.read_bytes()
            yield file.name.encode()
            yield _without(text, (*_TOKENIZER_IGNORED, *_SIDES)) if settings else text


def _without(text, names):
    """A JSON object without some of its entries, as bytes that are the same for equal objects."""
    kept = {name: value for name, value in json.loads(text).items() if name not in names}
    return json.dumps(kept, sort_keys=True).encode()
