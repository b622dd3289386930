"""A cross-encoder: both texts in one input, one logit."""

import functools
from pathlib import Path

import torch
from torch import nn

from fastsim.checks import check_choice, int_of
from fastsim.distributed import join
from fastsim.encoders.arguments import (
    check_model,
    check_path,
    checked_pairs,
    checked_texts,
    longest,
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
from fastsim.encoders.tokenized import tokenized
from fastsim.folders import replaced_folder
from fastsim.losses import cosent


def _mean(loss):
    """A mean over rows as the share of this rank in the mean over all of them."""

    def shared(logits, gold, group=None):
        batch = join(group, loss.__name__, logits, gold)
        # The sum, as a rank may have no rows.
        return loss(logits, gold, reduction="sum") * batch.row_weights("mean", logits)

    return shared


# Loss -> function of logits (N,) and gold values (N,) in [0, 1], with `group=`. CoSENT needs their
# order alone; its scale of 20 is for cosines, logits bring their own.
CROSS_LOSSES = {
    "cosent": functools.partial(cosent, scale=1.0),
    "cross_entropy": _mean(nn.functional.binary_cross_entropy_with_logits),
    "regression": _mean(nn.functional.mse_loss),
}
CROSS_FORMATS = ("scored pairs", "labelled pairs")
_LOUD = "THE QUICK BROWN FOX"  # as tokens, it shows whether a tokenizer lower-cases


class CrossEncoder(nn.Module):
    """A transformers model for sequence classification with one label, and its tokenizer.

    max_length: tokens of both texts together, longer pairs are cut; by default what model and
    tokenizer allow. TypeError, ValueError for arguments that do not fit: a max_length beyond that
    or too short for two texts, a tokenizer with neither a padding nor an end token.
    """

    def __init__(self, model, tokenizer, *, max_length=None):
        super().__init__()
        check_model(model, tokenizer)
        pad_with_end(tokenizer)
        if getattr(model.config, "pad_token_id", None) is None:
            # A decoder's score is that of the last token before the padding.
            model.config.pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer = model, tokenizer
        self.max_length = longest(model, tokenizer, max_length, pair=True)
        # transformers hands models over in evaluation mode: the whole is in one mode.
        self.train(model.training)

    @property
    def device(self):
        """Where the parameters are."""
        return next(self.parameters()).device

    def tokenize(self, first, second):
        """Two lists of texts as the tensors of `forward`, padded to the longest, on the CPU."""
        first, second = checked_pairs(first, second)
        return tokenized(self.tokenizer, first, second, max_length=self.max_length)

    def forward(self, features):
        """Logits (N,), float32 at least, of `tokenize`'s tensors."""
        logits = self.model(**features).logits[:, 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def score(self, first, second, *, batch_size=32, progress=False):
        """Logits (N,) of paired texts, without a gradient, float32 on the CPU.

        first, second: lists of str, equally many. batch_size: pairs that are scored at a time.
        progress: whether a progress bar is shown. TypeError, ValueError for arguments that do not
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
        """A cross-encoder from its folder, or a new one on the transformer of an encoder's folder.

        A new one starts with a random classification layer. A folder of sentence-transformers'
        CrossEncoder is read too, if all of it is a transformer, without a default prompt. Arguments
        and errors as `Encoder.from_pretrained`; `ModelError` too where the folder wants texts
        lower-cased and its tokenizer does not do it, since a cross-encoder's folder cannot say so.
        """
        folder = model_folder(name, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        parts = {}
        if (folder / "modules.json").is_file():
            parts = read_parts(folder, wanted=("transformer",), allow_pickle=allow_pickle)
            if is_cross_encoder(folder):
                _check_all_transformer(name, parts)
            folder = parts["transformer"]
        elif not (folder / "config.json").is_file():
            raise ModelError(f"model: {str(name)!r} holds neither modules.json nor config.json")
        model, tokenizer = load_transformer(
            "AutoModelForSequenceClassification",
            folder,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            num_labels=1,
        )
        loud = tokenizer.tokenize(_LOUD) != tokenizer.tokenize(_LOUD.lower())
        if parts.get("lower_case") and loud:
            raise ModelError(
                f"model: {str(name)!r} wants lower-cased texts, which a cross-encoder's folder"
                " cannot say; begin with a model whose tokenizer lower-cases them"
            )
        saved = parts.get("max_length")
        max_length = length_of(name, model, tokenizer, max_length, saved, pair=True)
        with loading(name):  # what is given here is known to fit
            return cls(model, tokenizer, max_length=max_length)

    def say_scores_are_logits(self):
        """Let the folder say that the logits are the scores: of a loss that trains them so.

        sentence-transformers' `CrossEncoder.predict` takes their sigmoid where it says nothing.
        """
        self.model.config.sentence_transformers = {
            "activation_fn": "torch.nn.modules.linear.Identity"
        }

    def save_pretrained(self, path):
        """Write a folder that transformers and `sentence_transformers.CrossEncoder` load.

        In one step, as `Encoder.save_pretrained`.
        """
        check_path("path", path)
        with replaced_folder(path) as folder:
            self.write_to(folder)

    def write_to(self, folder):
        """The files of `save_pretrained`, into an existing folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.model_max_length = self.max_length or self.tokenizer.model_max_length
        self.tokenizer.save_pretrained(folder)


def _check_all_transformer(name, parts):
    """ModelError for a cross-encoder's folder whose scores are not those of its transformer."""
    if parts["head"] or "pooling" in parts:
        raise ModelError(
            f"model: wanted a cross-encoder that is all transformer, {str(name)!r} has"
            " parts after it that score"
        )
    prompt = parts["prompts"].get(parts["default_prompt"])
    if prompt:
        raise ModelError(
            f"model: wanted a cross-encoder without a default prompt, {str(name)!r} has"
            f" default_prompt_name {parts['default_prompt']!r}, the text {prompt!r}"
        )


def is_cross_encoder(name):
    """Whether a folder holds a cross-encoder rather than an encoder: ours, transformers' or that
    of sentence-transformers.
    """
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
