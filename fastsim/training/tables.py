"""Columns of data that is in Arrow already, on the hub or in Parquet, checked whole."""

import pyarrow
import pyarrow.compute as compute


def checked_columns(table, keys, layout):
    """The columns of a `Format` as Arrow arrays; None where a row may not fit, or is not plain.

    keys: {name in the format: name in the table}. What is None is looked at row by row, which says
    what is wrong.
    """
    found = []
    for name in layout.columns:
        column = table[keys[name]].combine_chunks()
        if column.null_count:
            return None
        if name in layout.texts:
            fits = _is_text(column) and not _any(compute.match_substring(column, "\0"))
        elif name == "score":
            fits = _is_number(column)
            column = column.cast(pyarrow.float64()) if fits else column
            fits = fits and _all(compute.is_finite(column))
        elif pyarrow.types.is_integer(column.type):
            column, fits = column.cast(pyarrow.string()), True
        else:
            fits = _is_text(column)
            column = compute.utf8_trim_whitespace(column) if fits else column
        if not fits:
            return None
        found.append(column)
    return found


def _is_text(column):
    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return False
    return not _any(compute.equal(compute.utf8_trim_whitespace(column), ""))


def _is_number(column):
    return pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)


def _any(flags):
    return bool(compute.any(flags).as_py())


def _all(flags):
    return bool(compute.all(flags).as_py())
