"""Small models for the tests: random weights, the vocabulary of the demo's sentences."""

import atexit
import functools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from fastsim.training import demo

WORDS = sorted(
    {
        word
        for rows in demo.situations()
        for row in rows
        for text in row
        for word in re.findall(r"\w+|[^\w\s]", text.lower())
    }
)


@functools.cache
def _root():
    root = tempfile.mkdtemp(prefix="fastsim-tests-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@functools.cache
def tiny_bert():
    """A plain transformers folder: BERT of width 32, two layers, word vocabulary, 64 tokens."""
    import torch
    import transformers

    folder = _root() / "bert"
    folder.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(special + WORDS), encoding="utf-8")
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=64)
    config = transformers.BertConfig(
        vocab_size=len(special + WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def tiny_decoder():
    """A decoder-only folder (GPT-2 of width 32) with the same words and no padding token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = _root() / "gpt2"
    words = {word: number for number, word in enumerate(["<end>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", model_max_length=64
    )
    config = transformers.GPT2Config(
        vocab_size=len(words),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.GPT2Model(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def texts(count=40):
    """Distinct sentences of different lengths."""
    kept, held = demo.situations()
    return [text for row in held + kept for text in row][:count]


def real_data():
    """The folder of real data, or a skip with the reason."""
    folder = Path(os.environ.get("FASTSIM_DATA", Path(__file__).parents[2] / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"real data: no folder {folder}; set FASTSIM_DATA")
    return folder


def edit(path, **changes):
    """Changes entries of a JSON file, such as a folder's config.json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
