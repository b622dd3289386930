"""The embeddings of a corpus in a file, used again while the texts and the model are the same."""

import hashlib
from pathlib import Path

from fastsim.files import check_new_file, whole_file
from fastsim.training.evaluation import check_vectors

_KIND = "fastsim-index-1"


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
    for name, value in encoder.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().float().numpy().tobytes())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()
