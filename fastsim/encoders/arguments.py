"""What an encoder is given, checked."""

import os
from collections.abc import Mapping

import torch

from fastsim.checks import int_of


def check_model(model, tokenizer):
    """TypeError for what is no module, and no function of texts."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: wanted a transformers model, got {type(model).__name__}")
    if not callable(tokenizer):
        raise TypeError(f"tokenizer: wanted a tokenizer, got {type(tokenizer).__name__}")


def longest(model, tokenizer, max_length=None, *, pair=False, name="max_length"):
    """Tokens that a text, or a pair of texts, may have: max_length, else what model and tokenizer
    allow, or None where neither says. TypeError, ValueError for a max_length that leaves a text no
    token, or is more than they allow; `name` is what they call it.
    """
    most = _most(model, tokenizer)
    if max_length is None:
        return most if most < 10**6 else None
    # Told to cut below its special tokens, a tokenizer cuts nothing.
    least = tokenizer.num_special_tokens_to_add(pair=pair) + 1 + pair
    max_length = int_of(name, max_length)
    if not least <= max_length <= most:
        wanted = f"{least} to {most} tokens" if most < 10**6 else f"at least {least} tokens"
        raise ValueError(f"{name}: wanted {wanted}, got {max_length}")
    return max_length


def fitting_length(model, tokenizer, saved, *, pair=False):
    """The length that a folder says, at most what model and tokenizer allow; None where it says
    none.
    """
    if saved is None:
        return None
    fitting = min(saved, _most(model, tokenizer))
    return longest(model, tokenizer, fitting, pair=pair, name="max_seq_length")


def _most(model, tokenizer):
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet says -1: it has no limit
        return tokenizer.model_max_length
    return min(tokenizer.model_max_length, positions - _first_position(model))


def _first_position(model):
    """The position of a text's first token: of RoBERTa and its kin that after the padding's.

    These have the number of the padding beside their table of positions, and in it.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        positions = getattr(module, "position_embeddings", None)
        if padding is not None and getattr(positions, "padding_idx", None) == padding:
            return padding + 1
    return 0


def pad_with_end(tokenizer):
    """A tokenizer without a padding token pads with its end token; ValueError without either."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("tokenizer: wanted a padding or an end token, got neither")
        tokenizer.pad_token = tokenizer.eos_token


def listed(name, values, kind, what):
    """An iterable of `kind`, called `what`, as a list; TypeError for anything else."""
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
    """{name: text} as a dict of its own; None: an empty one."""
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
    """Names of devices of this machine, or torch.devices, as a list; None stays None."""
    if devices is None:
        return None
    devices = listed("devices", devices, (str, torch.device), "device names")
    if not devices:
        raise ValueError("devices: wanted a list of at least one device name, got []")
    for device in devices:
        try:
            count = torch.get_device_module(device).device_count()
            here = (torch.device(device).index or 0) < count
        except (RuntimeError, AttributeError):  # no name of a device; "meta"
            here = False
        if not here:
            raise ValueError(
                f"devices: wanted devices of this machine, such as 'cpu', got {str(device)!r}"
            )
    return devices


def check_path(name, value):
    """TypeError for what is neither a str nor a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: wanted a str or a path, got {type(value).__name__}")
