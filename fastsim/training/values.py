"""Checks the values of rows and turns them into columns of texts, scores and labels."""

import math

from fastsim.training.rows import DataError


def checked_rows(path, part, places, layout, bad):
    """The columns of some rows. The faults of rows go to the list `bad`; None: they are raised."""
    quick = _checked_by_column([row for _, row in part], places, layout)
    if quick is not None:
        return quick
    kept = []
    for where, row in part:
        try:
            if isinstance(row, DataError):
                raise row
            kept.append(
                [
                    _value(row[place], name, layout, path, where)
                    for place, name in zip(places, layout.columns, strict=True)
                ]
            )
        except DataError as error:
            if bad is None:
                raise
            bad.append(str(error))
    return list(zip(*kept, strict=True)) or [() for _ in places]


def _checked_by_column(rows, places, layout):
    """The columns, or None if a check of whole columns cannot rule out a fault."""
    if DataError in set(map(type, rows)):
        return None
    fields = list(zip(*rows, strict=True))
    columns = []
    for place, name in zip(places, layout.columns, strict=True):
        values = fields[place]
        types = set(map(type, values))
        if name in layout.texts:
            if types != {str} or not all(map(str.strip, values)) or any("\0" in v for v in values):
                return None
            if not _is_unicode("".join(values)):
                return None
        elif name == "score" and types <= {str, int, float}:
            try:
                values = list(map(float, values))
            except (ValueError, OverflowError):
                return None
            if not all(map(math.isfinite, values)):
                return None
        else:
            return None
        columns.append(values)
    return columns


def _value(value, name, layout, path, where):
    if name in layout.texts:
        return checked_text(value, name, path, where)
    return (_score if name == "score" else _label)(value, name, path, where)


def checked_text(value, name, path, where):
    """The value; `DataError` if it is not a text that can be encoded."""
    if not isinstance(value, str):
        raise DataError(f"{path}, {where}: {name}: wanted a text, got {value!r:.40}")
    if not value.strip():
        raise DataError(f"{path}, {where}: {name}: the text is empty")
    if "\0" in value:
        raise DataError(f"{path}, {where}: {name}: the text holds a NUL byte")
    if not _is_unicode(value):
        raise DataError(f"{path}, {where}: {name}: the text holds half of a surrogate pair")
    return value


def _is_unicode(text):
    """Whether a text can be written as UTF-8, which not every JSON string can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _score(value, name, path, where):
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        hint = "; does the file have a header? Map it with --columns score=NAME,..."
        hint = hint if where == "line 1" and isinstance(value, str) else ""
        raise DataError(f"{path}, {where}: {name}: wanted a number, got {value!r:.40}{hint}")
    return number


def _label(value, name, path, where):
    """A class as text; 1, 1.0 and "1" are the same class."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int)) or not str(value).strip():
        raise DataError(f"{path}, {where}: {name}: wanted a class, got {value!r:.40}")
    return str(value).strip()
