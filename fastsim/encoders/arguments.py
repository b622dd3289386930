"""Checks of the arguments of encoders."""

import os
from collections.abc import Mapping

import torch

from fastsim.checks import int_of

_NO_LIMIT = 10**6  # tokens; tokenizers without a limit have a huge one


def check_model(model, tokenizer):
    """TypeError unless the model is a torch module and the tokenizer a callable."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: wanted a transformers model, got {type(model).__name__}")
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: wanted a tokenizer, got {type(tokenizer).__name__}")


def checked_length(model, tokenizer, max_length=None, *, pair=False, name="max_length"):
    """The maximum number of tokens of a text, or of a pair: max_length, or by default the limit.

    The limit is that of model and tokenizer; None if they have none. TypeError, ValueError for a
    max_length above the limit or too small for any token of a text. name: of the argument.
    """
    limit = _limit(model, tokenizer)
    if max_length is None:
        return limit if limit < _NO_LIMIT else None
    # A tokenizer truncates nothing if the length is below that of its special tokens.
    least = tokenizer.num_special_tokens_to_add(pair=pair) + 1 + pair
    max_length = int_of(name, max_length)
    if not least <= max_length <= limit:
        wanted = f"{least} to {limit} tokens" if limit < _NO_LIMIT else f"at least {least} tokens"
        raise ValueError(f"{name}: wanted {wanted}, got {max_length}")
    return max_length


def saved_length(model, tokenizer, saved, *, pair=False):
    """The length in a model's folder, cut to the limit of model and tokenizer; None stays None."""
    if saved is None:
        return None
    length = min(saved, _limit(model, tokenizer))
    return checked_length(model, tokenizer, length, pair=pair, name="max_seq_length")


def _limit(model, tokenizer):
    """The most tokens that model and tokenizer allow; a huge number if they have no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet has -1, for no limit
        return tokenizer.model_max_length
    return min(tokenizer.model_max_length, positions - _first_position(model))


def _first_position(model):
    """The position of the first token of a text: 0, but in RoBERTa and its kin after the padding's.

    Those models have the index of the padding both in their table of positions and next to it.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        positions = getattr(module, "position_embeddings", None)
        if padding is not None and getattr(positions, "padding_idx", None) == padding:
            return padding + 1
    return 0


def pad_with_end(tokenizer):
    """Let a tokenizer without a padding token pad with its end token; ValueError without either."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("tokenizer: wanted one with a padding or an end token, got neither")
        tokenizer.pad_token = tokenizer.eos_token


def listed(name, values, kind, what):
    """An iterable of `kind`, which messages call `what`, as a list; TypeError for anything else."""
    if isinstance(values, str):
        raise TypeError(f"{name}: wanted a list of {what}, got one str")
    try:
        values = list(values)
    except TypeError:
        raise TypeError(f"{name}: wanted a list of {what}, got {type(values).__name__}") from None
    others = [type(value).__name__ for value in values if not isinstance(value, kind)]
    if others:
        raise TypeError(f"{name}: wanted a list of {what}, got {others[0]} in it")
    return values


def checked_texts(name, texts):
    """An iterable of str as a list."""
    return listed(name, texts, str, "str")


def checked_pairs(first, second):
    """Both texts of each pair, as two lists."""
    first, second = checked_texts("first", first), checked_texts("second", second)
    if len(first) != len(second):
        raise ValueError(f"second: wanted {len(first)} texts, as first has, got {len(second)}")
    return first, second


def check_text(name, value):
    """TypeError for anything but a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: wanted a str, got {type(value).__name__}")


def checked_prompts(name, prompts):
    """A copy of {name: text}; None: an empty dict."""
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, Mapping):
        raise TypeError(f"{name}: wanted {{name: text}}, got {type(prompts).__name__}")
    for key, text in prompts.items():
        check_text(f"a name in {name}", key)
        check_text(f"{name}[{key!r}]", text)
    return dict(prompts)


def positive_or_none(name, value):
    """`value` as an int of at least 1; None stays None."""
    return None if value is None else int_of(name, value, 1)


def checked_devices(devices):
    """A list of devices of this machine, given by name or as torch.device; None stays None."""
    if devices is None:
        return None
    devices = listed("devices", devices, (str, torch.device), "device names")
    if not devices:
        raise ValueError("devices: wanted a list of at least one device name, got []")
    for device in devices:
        try:
            count = torch.get_device_module(device).device_count()
            exists = (torch.device(device).index or 0) < count
        except (RuntimeError, AttributeError):  # not the name of a device; "meta"
            exists = False
        if not exists:
            raise ValueError(
                f"devices: wanted devices of this machine, such as 'cpu', got {str(device)!r}"
            )
    return devices


def check_path(name, value):
    """TypeError for anything but a str or a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: wanted a str or a path, got {type(value).__name__}")
