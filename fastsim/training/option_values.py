"""Options as the types in their annotations: numbers of any library, paths as their text."""

import os
from types import NoneType

from fastsim.checks import check_flags, float_of, int_of


def as_kind(name, value, kinds):
    """The value of the option `name` as one of `kinds`, the types in its annotation.

    TypeError for another type, ValueError for a flag that is neither True nor False.
    """
    if value is None and NoneType in kinds:
        return None
    if name in _PARTS:
        return _PARTS[name](name, value)
    if bool in kinds:
        check_flags(**{name: value})
        return bool(value)
    if int in kinds:
        return int_of(name, value)
    if float in kinds:
        return float_of(name, value)
    if list in kinds and isinstance(value, (list, tuple)):
        return [_text(name, part, kinds) for part in value]
    return _text(name, value, kinds)


def _text(name, value, kinds=(str,)):
    paths = os.PathLike in kinds
    text = os.fspath(value) if paths and isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        wanted = "a text or a path" if paths else "a text"
        wanted += ", or a list of them" if list in kinds else ""
        raise TypeError(f"{name}: wanted {wanted}, got {type(value).__name__}")
    return text


def _range(name, value):
    try:
        low, high = (float_of(name, end) for end in value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: wanted two numbers, (low, high), got {value!r}") from None
    return low, high


def _names(name, values):
    return tuple(_text(name, value) for value in _list(name, values, "texts"))


def _widths(name, values):
    return tuple(int_of(name, value, 1) for value in _list(name, values, "ints"))


def _list(name, values, what):
    if not isinstance(values, (list, tuple, NoneType)):
        raise TypeError(f"{name}: wanted a list of {what}, got {type(values).__name__}")
    return values or ()


def _prompts(name, given):
    return {key: _text(f"{name}: {key}", text) for key, text in _dict(name, given).items()}


def _of_loss(name, given):
    """Numbers of torch and NumPy as Python's, which JSON can hold; the rest as it is."""
    found = {}
    for key, value in _dict(name, given).items():
        if getattr(value, "requires_grad", False):
            raise ValueError(
                f"{name}: {key}: wanted a number, got a tensor that asks for a gradient;"
                f" learn=({key!r},) learns it"
            )
        found[key] = value.item() if getattr(value, "ndim", None) == 0 else value
    return found


def _dict(name, given):
    if not isinstance(given, dict):
        raise TypeError(f"{name}: wanted a dictionary, got {type(given).__name__}")
    for key in given:
        if not isinstance(key, str):
            raise TypeError(f"{name}: wanted names that are texts, got {key!r}")
    return given


# Options of several parts.
_PARTS = {
    "score_range": _range,
    "learn": _names,
    "matryoshka": _widths,
    "loss_options": _of_loss,
    "prompts": _prompts,
}
