"""Text encoders: a tokenizer, a transformer, pooling and an optional head; one vector per text.

Folders have the layout of sentence-transformers: `modules.json` names the parts, and each part has
a folder. A plain transformers folder can be read too.
"""

import copy
import inspect
import warnings
from pathlib import Path

import torch
from torch import nn

from fastsim.checks import FLOATING, check_choice, check_flags, check_number, float_of, int_of
from fastsim.encoders.arguments import (
    check_model,
    check_path,
    check_text,
    checked_devices,
    checked_length,
    checked_prompts,
    checked_texts,
    listed,
    pad_with_end,
    positive_or_none,
)
from fastsim.encoders.batches import encode_batches, encode_in_processes
from fastsim.encoders.model_files import (
    is_decoder,
    length_of,
    load_transformer,
    loading,
    model_folder,
    read_parts,
    write_parts,
)
from fastsim.encoders.names import EMBEDDED, POOLINGS, SIMILARITIES, ModelError
from fastsim.encoders.parts import Dense, Normalize, check_widths, pool, width_after
from fastsim.encoders.tokenized import stand_in, tokenized
from fastsim.folders import replaced_folder

__all__ = ["EMBEDDED", "POOLINGS", "Dense", "Encoder", "ModelError", "Normalize", "pool"]


class Encoder(nn.Module):
    """Maps texts to vectors: transformer, pooling, head.

    Args:
        model: a transformers model whose first output is the token states (N, T, D).
        tokenizer: its tokenizer.
        pooling: one of `POOLINGS`.
        head: modules after the pooling (`Dense`, `Normalize`), in order.
        max_length: tokens per text, longer texts are truncated; None: the limit of model and
            tokenizer.
        lower_case: whether texts are lower-cased before the tokenizer.
        prompts: {name: text that is put before a text}.
        default_prompt: the name of the prompt that `encode` uses if none is given.
        include_prompt: whether the tokens of a prompt take part in the pooling.
        similarity: one of `SIMILARITIES`, by which the embeddings are meant to be compared, and are
            compared in evaluation, mining and search. The encoder itself does not use it.
        truncate_dim: the width to which `encode` truncates embeddings; None: the full width.
            `forward` does not truncate.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Example:
        >>> from fastsim.encoders.model_files import EMBEDDED
        >>> encoder = fastsim.Encoder.from_pretrained(EMBEDDED)
        >>> encoder.encode(["a text", "another"]).shape
        torch.Size([2, 384])
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
        include_prompt=True,
        similarity="cosine",
        truncate_dim=None,
    ):
        super().__init__()
        check_model(model, tokenizer)
        check_choice("pooling", pooling, tuple(POOLINGS))
        head = listed("head", head, (Dense, Normalize), "Dense or Normalize")
        limit = checked_length(model, tokenizer, max_length)
        prompts = checked_prompts("prompts", prompts)
        if default_prompt is not None and default_prompt not in list(prompts):
            raise ValueError(f"default_prompt: wanted a name in prompts, got {default_prompt!r}")
        check_flags(lower_case=lower_case, include_prompt=include_prompt)
        check_choice("similarity", similarity, SIMILARITIES)
        truncate_dim = positive_or_none("truncate_dim", truncate_dim)
        pad_with_end(tokenizer)
        self.model, self.tokenizer, self.pooling = model, tokenizer, pooling
        if head:
            check_widths(head, self.width)
        self.head = nn.Sequential(*head)
        self.max_length = limit
        self.lower_case = lower_case
        self.prompts, self.default_prompt = prompts, default_prompt
        self.include_prompt = include_prompt
        self.similarity, self.truncate_dim = similarity, truncate_dim
        # All of it in the mode of the model: transformers loads models in evaluation mode.
        self.train(model.training)

    @property
    def dim(self):
        """Width of the embeddings."""
        return width_after(self.head, self.width)

    @property
    def width(self):
        """Width of the token states."""
        config = self.model.config
        return getattr(config, "hidden_size", None) or config.d_model

    @property
    def encoded_dim(self):
        """Width of what `encode` returns: `dim`, or `truncate_dim` where that is less."""
        return min(self.dim, self.truncate_dim or self.dim)

    @property
    def device(self):
        """The device of the parameters."""
        return next(self.parameters()).device

    def tokenize(self, texts, prompt=""):
        """The input of `forward`: tensors on the CPU, padded to the longest text.

        prompt: a text put before each text.
        """
        check_text("prompt", prompt)
        features = self._tokenize([prompt + text for text in checked_texts("texts", texts)])
        if prompt and not self.include_prompt:
            # Without the end token, which follows the text and not the prompt.
            prompt_ids, empty_ids = self._ids(prompt), self._ids("")
            has_end = prompt_ids[-1:] == empty_ids[-1:]
            mask = features["attention_mask"]
            skipped = mask.cumsum(1) <= len(prompt_ids) - int(has_end)
            features["pooling_mask"] = mask.masked_fill(skipped, 0)
        return features

    def _tokenize(self, texts):
        if self.lower_case:
            texts = [text.lower() for text in texts]
        return tokenized(self.tokenizer, texts, max_length=self.max_length)

    def _ids(self, text):
        """The token ids of a text, without padding."""
        features = self._tokenize([text])
        return features["input_ids"][features["attention_mask"].bool()].tolist()

    def forward(self, features):
        """Embeddings (N, dim) of the tensors of `tokenize`; N = 0 is allowed, as on one rank."""
        mask = features["attention_mask"]
        if len(mask) == 0:
            return self.forward(stand_in(features))[:0]
        pooling_mask = features.get("pooling_mask", mask)
        features = {name: value for name, value in features.items() if name != "pooling_mask"}
        if self._needs_positions():
            # Otherwise a decoder with learnt positions counts the padding on the left.
            features["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        states = self.model(**features)[0]
        return self.head(pool(states, pooling_mask, self.pooling, tokens=mask))

    def _needs_positions(self):
        """Whether the model needs token positions: a decoder with padding on the left."""
        bert_like = hasattr(self.model.config, "type_vocab_size")
        if self.tokenizer.padding_side != "left" or bert_like:
            return False
        return "position_ids" in inspect.signature(self._base().forward).parameters

    def _base(self):
        """The transformer itself, below an adapter."""
        adapted = hasattr(self.model, "get_base_model")
        return self.model.get_base_model() if adapted else self.model

    def add_lora(self, rank, *, scale=2.0):
        """Train only low-rank additions to the linear layers (LoRA, Hu et al. 2021), with peft.

        rank: of the additions; scale: their factor. `save_pretrained` merges them into the weights,
        so that the folder can be loaded without peft. TypeError, ValueError for arguments that do
        not fit.
        """
        rank, scale = int_of("rank", rank, 1), float_of("scale", scale)
        check_number("scale", scale, positive=True)
        import peft
        from transformers.pytorch_utils import Conv1D

        config = peft.LoraConfig(
            task_type=peft.TaskType.FEATURE_EXTRACTION,
            r=rank,
            lora_alpha=scale * rank,
            target_modules="all-linear",
            # The linear layers of GPT-2 store transposed weights.
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in self.model.modules()),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
            self.model = peft.get_peft_model(self.model, config)

    def encode_query(self, texts, **options):
        """`encode` with the prompt named "query", if there is one."""
        return self.encode(texts, **{"prompt": self.prompt_name("query"), **options})

    def encode_document(self, texts, **options):
        """`encode` with the prompt named "document", "passage" or "corpus", if there is one."""
        return self.encode(texts, **{"prompt": self.prompt_name("document"), **options})

    def prompt_of_column(self, column):
        """The text of the prompt for a column, else that of the default prompt, else ""."""
        return self.prompts.get(self.prompt_name(column) or self.default_prompt, "")

    def prompt_name(self, part):
        """The name of the prompt for a column, or for the part "query" or "document" of a search.

        Anchors are queries; positives and negatives are documents. None if there is no such prompt.
        """
        check_text("part", part)
        names = [part]
        if part == "anchor":
            names.append("query")
        if part.startswith(("document", "positive", "negative")):
            names += ["document", "passage", "corpus"]
        return next((name for name in names if name in self.prompts), None)

    def encode(
        self,
        texts,
        *,
        batch_size=32,
        prompt=None,
        normalize=False,
        progress=None,
        dtype=torch.float32,
        to_numpy=False,
        devices=None,
        truncate_dim=None,
    ):
        """Embeddings of a list of texts, without a gradient: (N, encoded_dim) on the CPU.

        Texts are encoded in order of length, so that batches have little padding; the result has
        the original order. To encode in half precision, convert the encoder: `encoder.bfloat16()`.

        Args:
            texts: an iterable of str.
            batch_size: texts to encode at a time.
            prompt: a name in `prompts`, or a text to put before each text; None: the
                `default_prompt`.
            normalize: whether to divide rows by their norms.
            progress: whether to show a progress bar on the error stream; None: if that is a
                terminal and there is more than one batch.
            dtype: of the result; float16 halves its memory.
            to_numpy: whether to return a numpy array instead of a tensor.
            devices: the devices to encode on, with a process each: `["cuda:0", "cuda:1"]`, or
                `["cpu"] * 4`, which share the threads. The processes import the main script, which
                therefore needs the line `if __name__ == "__main__":`. None: this process, on the
                encoder's device.
            truncate_dim: the width to which embeddings are truncated, before `normalize`; None: the
                encoder's `truncate_dim`.

        Returns:
            (N, encoded_dim), or (N, truncate_dim). The values do not depend on the number of
            devices of one kind, as the batches are the same.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        texts = checked_texts("texts", texts)
        batch_size = int_of("batch_size", batch_size, 1)
        if prompt is not None:
            check_text("prompt", prompt)
        check_flags(normalize=normalize, to_numpy=to_numpy)
        check_choice("progress", progress, (None, False, True))
        check_choice("dtype", dtype, FLOATING)
        if to_numpy and dtype == torch.bfloat16:
            raise ValueError("dtype: wanted a dtype of numpy, such as float16, got bfloat16")
        devices = checked_devices(devices)
        truncate_dim = positive_or_none("truncate_dim", truncate_dim)
        from tqdm.auto import tqdm

        width = min(self.dim, truncate_dim or self.encoded_dim)
        prompt = self.default_prompt if prompt is None else prompt
        prefix = "" if prompt is None else self.prompts.get(prompt, prompt)
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        row_batches = [
            order[start : start + batch_size] for start in range(0, len(order), batch_size)
        ]
        batches = ([texts[row] for row in rows] for rows in row_batches)
        if devices is None or not texts:
            encoded = encode_batches(self, batches, prefix)
        else:
            encoded = encode_in_processes(self, batches, prefix, devices)
        # For tqdm, disable=None hides the bar unless the stream is a terminal.
        hidden = True if len(row_batches) < 2 and progress is None else None
        hidden = not progress if progress is not None else hidden
        bar = tqdm(row_batches, desc="encode", unit="batch", disable=hidden)
        result = torch.empty(len(texts), width, dtype=dtype)
        for rows, vectors in zip(bar, encoded, strict=True):
            vectors = vectors[:, :width]
            if normalize:
                vectors = nn.functional.normalize(vectors, dim=1)
            result[rows] = vectors.to(dtype).cpu()
        return result.numpy() if to_numpy else result

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

        Args:
            name: a folder; or `EMBEDDED`, the bundled model; or a name on the hub.
            pooling: one of `POOLINGS`; None: as in the folder, or for a plain folder "mean", or
                "last" for a model that reads from left to right.
            dense: the width of a new `Dense` layer after the folder's head; None: no such layer.
            max_length: tokens per text; None: as in the folder, or for a plain folder the limit.
            trust_remote_code: whether code in the folder may run.
            allow_pickle: whether weights other than safetensors may be read.

        Raises:
            ModelError, which is a ValueError: if it cannot be loaded.
            TypeError, ValueError: for other arguments that do not fit.
        """
        if pooling is not None:
            check_choice("pooling", pooling, tuple(POOLINGS))
        dense = positive_or_none("dense", dense)
        folder = model_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        if (folder / "modules.json").is_file():
            parts = read_parts(folder, allow_pickle=allow_pickle)
        elif any((folder / f"{part}config.json").is_file() for part in ("", "adapter_")):
            parts = {"transformer": folder}
        else:
            raise ModelError(f"model: {str(name)!r} has neither modules.json nor config.json")
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
        elif is_decoder(model.config):
            parts.setdefault("pooling", "last")
        saved = parts.pop("max_length", None)
        max_length = length_of(name, model, tokenizer, max_length, saved)
        with loading(name):  # arguments have been checked: an error is the folder's
            encoder = cls(model, tokenizer, head=head, max_length=max_length, **parts)
        if dense is not None:
            encoder.head.append(Dense(encoder.dim, dense))
        return encoder

    def save_pretrained(self, path):
        """Write a folder that `SentenceTransformer(path)` and `from_pretrained` can load.

        All files are written to a folder inside `path` and then moved into place, so that a full
        disk leaves the old ones as they were. Other files in the folder are kept. OSError if it
        cannot be written.
        """
        check_path("path", path)
        with replaced_folder(path) as folder:
            self.write_to(folder)

    def write_to(self, folder):
        """Write the files of `save_pretrained` into an existing folder."""
        model = self.model
        if hasattr(model, "merge_and_unload"):
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        write_parts(self, Path(folder))
