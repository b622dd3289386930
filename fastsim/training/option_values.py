"""Converts options to the types of their annotations: numbers of any library, paths to text."""

import os
from types import NoneType

from fastsim.checks import check_flags, float_of, int_of


def converted(name, value, kinds):
    """The value of the option `name` as one of `kinds`, the types of its annotation.

    TypeError for another type, ValueError for a flag that is neither True nor False.
    """
    if value is None and NoneType in kinds:
        return None
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](name, value)
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


def _prompts(name, values):
    return {key: _text(f"{name}: {key}", text) for key, text in _dict(name, values).items()}


def _loss_options(name, values):
    """Converts numbers of torch and NumPy to those of Python, which JSON can hold."""
    result = {}
    for key, value in _dict(name, values).items():
        if getattr(value, "requires_grad", False):
            raise ValueError(
                f"{name}: {key}: wanted a number, got a tensor that requires a gradient;"
                f" learn=({key!r},) learns it"
            )
        result[key] = value.item() if getattr(value, "ndim", None) == 0 else value
    return result


def _dict(name, values):
    if not isinstance(values, dict):
        raise TypeError(f"{name}: wanted a dictionary, got {type(values).__name__}")
    for key in values:
        if not isinstance(key, str):
            raise TypeError(f"{name}: wanted names that are texts, got {key!r}")
    return values


# Options that hold several values.
_COLLECTIONS = {
    "score_range": _range,
    "learn": _names,
    "matryoshka": _widths,
    "loss_options": _loss_options,
    "prompts": _prompts,
}
