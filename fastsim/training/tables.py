"""Checks whole Arrow columns, from the hub, from Parquet or from blocks of CSV."""

import pyarrow
import pyarrow.compute as compute


def checked_columns(table, keys, layout):
    """The columns of a `Format` as Arrow arrays; None if some row may have a fault.

    Then the rows have to be checked one by one, which reports the fault. keys: {name in the format:
    name in the table}.
    """
    columns = []
    for name in layout.columns:
        column = table[keys[name]].combine_chunks()
        if column.null_count:
            return None
        if name in layout.texts:
            fits = _is_text(column) and not _any(compute.match_substring(column, "\0"))
        elif name == "score":
            column = _numbers(column)
            fits = column is not None and _all(compute.is_finite(column))
        elif pyarrow.types.is_integer(column.type):
            column, fits = column.cast(pyarrow.string()), True
        else:
            fits = _is_text(column)
            column = compute.utf8_trim_whitespace(column) if fits else column
        if not fits:
            return None
        columns.append(column)
    return columns


def _is_text(column):
    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return False
    return not _any(compute.equal(compute.utf8_trim_whitespace(column), ""))


def _numbers(column):
    """A column of numbers, or of texts that are all numbers, as float64; else None."""
    numeric = pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)
    if not (numeric or _is_text(column)):
        return None
    try:
        numbers = column if numeric else compute.utf8_trim_whitespace(column)
        return numbers.cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:  # Python may accept the number, such as 1_000 and 2**60 + 1
        return None


def _any(flags):
    return bool(compute.any(flags).as_py())


def _all(flags):
    return bool(compute.all(flags).as_py())
