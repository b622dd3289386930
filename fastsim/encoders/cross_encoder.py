"""Cross-encoders: both texts of a pair in one input, one logit per pair."""

import functools
from pathlib import Path

import torch
from torch import nn

from fastsim.checks import check_choice, int_of
from fastsim.distributed import join
from fastsim.encoders.arguments import (
    check_model,
    check_path,
    checked_length,
    checked_pairs,
    checked_texts,
    pad_with_end,
)
from fastsim.encoders.model_files import (
    length_of,
    load_transformer,
    loading,
    model_folder,
    read_about,
    read_json,
    read_parts,
)
from fastsim.encoders.names import ModelError
from fastsim.encoders.tokenized import stand_in, tokenized
from fastsim.folders import replaced_folder
from fastsim.losses import cosent
from fastsim.precision import compute_dtype


def _group_mean(loss):
    """A loss whose mean is taken over the rows of all ranks of a group."""

    def group_mean(logits, gold, group=None):
        batch = join(group, loss.__name__, logits, gold)
        # Computed from the sum, as a rank may have no rows.
        return loss(logits, gold, reduction="sum") * batch.row_weights("mean", logits)

    return group_mean


# Loss -> function of logits (N,) and gold values (N,) in [0, 1], with `group=`. CoSENT's default
# scale of 20 is for cosines; logits are not bounded.
CROSS_LOSSES = {
    "cosent": functools.partial(cosent, scale=1.0),
    "cross_entropy": _group_mean(nn.functional.binary_cross_entropy_with_logits),
    "regression": _group_mean(nn.functional.mse_loss),
}
CROSS_FORMATS = ("scored pairs", "labelled pairs")
_UPPER_CASE = "THE QUICK BROWN FOX"  # its tokens show whether a tokenizer lower-cases


class CrossEncoder(nn.Module):
    """A transformers model for sequence classification with one label, and its tokenizer.

    max_length: tokens of a pair; longer pairs are truncated. None: the limit of model and
    tokenizer. TypeError, ValueError for arguments that do not fit, such as a max_length above the
    limit or too small for two texts, or a tokenizer with neither a padding nor an end token.
    """

    def __init__(self, model, tokenizer, *, max_length=None):
        super().__init__()
        check_model(model, tokenizer)
        pad_with_end(tokenizer)
        if getattr(model.config, "pad_token_id", None) is None:
            # A decoder scores the last token before the padding, which it has to recognise.
            model.config.pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer = model, tokenizer
        self.max_length = checked_length(model, tokenizer, max_length, pair=True)
        # All of it in the mode of the model: transformers loads models in evaluation mode.
        self.train(model.training)

    @property
    def device(self):
        """The device of the parameters."""
        return next(self.parameters()).device

    def tokenize(self, first, second):
        """The input of `forward` for paired texts: tensors on the CPU, padded to the longest."""
        first, second = checked_pairs(first, second)
        return tokenized(self.tokenizer, first, second, max_length=self.max_length)

    def forward(self, features):
        """Logits (N,) of the tensors of `tokenize`, in float32 or more; N = 0 is allowed."""
        if len(features["attention_mask"]) == 0:
            return self.forward(stand_in(features))[:0]
        logits = self.model(**features).logits[:, 0]
        return logits.to(compute_dtype(logits))

    def score(self, first, second, *, batch_size=32, progress=False):
        """Logits (N,) of paired texts, without a gradient, float32 on the CPU.

        first, second: lists of str of the same length. batch_size: pairs to score at a time.
        progress: whether to show a progress bar. TypeError, ValueError for arguments that do not
        fit.
        """
        from tqdm.auto import tqdm

        first, second = checked_pairs(first, second)
        batch_size = int_of("batch_size", batch_size, 1)
        check_choice("progress", progress, (None, False, True))
        order = sorted(range(len(first)), key=lambda i: -len(first[i]) - len(second[i]))
        result = torch.empty(len(first))
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                starts = range(0, len(order), batch_size)
                for start in tqdm(starts, desc="score", unit="batch", disable=not progress):
                    rows = order[start : start + batch_size]
                    features = self.tokenize([first[i] for i in rows], [second[i] for i in rows])
                    features = {name: value.to(self.device) for name, value in features.items()}
                    result[rows] = self(features).float().cpu()
        finally:
            self.train(was_training)
        return result

    @classmethod
    def from_pretrained(cls, name, *, max_length=None, trust_remote_code=False, allow_pickle=False):
        """A cross-encoder from its folder, or a new one with the transformer of an encoder.

        A new one starts with a random classification layer. A folder of sentence-transformers'
        CrossEncoder can be read if it has only a transformer and no default prompt. Arguments and
        errors as for `Encoder.from_pretrained`. `ModelError` also if the folder lower-cases texts
        and its tokenizer does not, which the folder of a cross-encoder cannot express.
        """
        folder = model_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        parts = {}
        if (folder / "modules.json").is_file():
            parts = read_parts(folder, required=("transformer",), allow_pickle=allow_pickle)
            if is_cross_encoder(folder):
                _check_only_transformer(name, parts)
            folder = parts["transformer"]
        elif not (folder / "config.json").is_file():
            raise ModelError(f"model: {str(name)!r} has neither modules.json nor config.json")
        model, tokenizer = load_transformer(
            "AutoModelForSequenceClassification",
            folder,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            num_labels=1,
        )
        cased = tokenizer.tokenize(_UPPER_CASE) != tokenizer.tokenize(_UPPER_CASE.lower())
        if parts.get("lower_case") and cased:
            raise ModelError(
                f"model: {str(name)!r} lower-cases texts, which a cross-encoder's folder cannot"
                " express; use a model whose tokenizer lower-cases them"
            )
        saved = parts.get("max_length")
        max_length = length_of(name, model, tokenizer, max_length, saved, pair=True)
        with loading(name):  # arguments have been checked: an error is the folder's
            return cls(model, tokenizer, max_length=max_length)

    def say_scores_are_logits(self):
        """Store in the configuration that the logits are the scores, as some losses train them.

        By default sentence-transformers' `CrossEncoder.predict` applies a sigmoid to the logits.
        """
        self.model.config.sentence_transformers = {
            "activation_fn": "torch.nn.modules.linear.Identity"
        }

    def save_pretrained(self, path):
        """Write a folder that transformers and `sentence_transformers.CrossEncoder` can load.

        Atomically, as `Encoder.save_pretrained`.
        """
        check_path("path", path)
        with replaced_folder(path) as folder:
            self.write_to(folder)

    def write_to(self, folder):
        """Write the files of `save_pretrained` into an existing folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.model_max_length = self.max_length or self.tokenizer.model_max_length
        self.tokenizer.save_pretrained(folder)


def _check_only_transformer(name, parts):
    """ModelError for a cross-encoder's folder whose scores are not those of its transformer."""
    if parts["head"] or "pooling" in parts:
        raise ModelError(
            f"model: wanted a cross-encoder with only a transformer, got {str(name)!r}, which has"
            " further parts"
        )
    prompt = parts["prompts"].get(parts["default_prompt"])
    if prompt:
        raise ModelError(
            f"model: wanted a cross-encoder without a default prompt, got {str(name)!r}, which has"
            f" default_prompt_name {parts['default_prompt']!r}, the text {prompt!r}"
        )


def is_cross_encoder(name):
    """Whether a folder has a cross-encoder: of fastsim, transformers or sentence-transformers."""
    check_path("name", name)
    folder = Path(name)
    if (folder / "modules.json").is_file():
        return read_about(folder).get("model_type") == "CrossEncoder"
    if not (folder / "config.json").is_file():
        return False
    kinds = read_json(folder / "config.json").get("architectures") or []
    with loading(folder / "config.json"):
        kinds = checked_texts("architectures", kinds)
    return any(kind.endswith("ForSequenceClassification") for kind in kinds)
