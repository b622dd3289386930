"""Reading data files, strictly: a bad row stops with file, line or row, and reason.

What is in Arrow already (Parquet, the hub) is looked at by columns, the rest by rows; the rows end
as a `datasets.Dataset` (fastsim/training/store.py).
"""

import os

from fastsim.tell import tell
from fastsim.training.columns import check_header, header_fault, parse_columns
from fastsim.training.counted import counted
from fastsim.training.formats import format_of
from fastsim.training.hub import is_hub
from fastsim.training.hub import rows as hub_rows
from fastsim.training.opened import open_delimited, open_named, open_tables
from fastsim.training.rows import (
    KINDS,
    SUFFIXES,
    DataError,
    check_file,
    corpus_kind,
    delimited_rows,
    kind_of,
    lines,
    named_rows,
    sound,
    suffix_of,
    width_fault,
)
from fastsim.training.store import Store
from fastsim.training.values import checked_text

__all__ = ["KINDS", "SUFFIXES", "DataError", "read_corpus", "read_data"]

_SHOWN = 3  # rows left out that are named


def read_data(
    path,
    *,
    columns=None,
    kind=None,
    delimiter=None,
    header=None,
    skip_bad_rows=False,
    say=None,
):
    """A file as (datasets.Dataset of the columns in use, `Format`).

    Scores become floats; labels stay text, but may be numbers in JSON and Parquet.

    Args:
        path: CSV or TSV (UTF-8; TSV without quoting), JSON lines or JSON, plain or gzip; Parquet;
            or a data set on the hub (`fastsim.training.hub`); or a list of these with the same
            columns.
        columns: a list of items `role`, `role=name in the header`, or `_` (not used); None: the
            header has the names of `formats.COLUMNS`. Plain roles select from a header that has
            them all; otherwise the file has no header, and they name its columns in order.
        kind: the format of the files, by default what their suffixes say.
        delimiter: of a CSV file, by default a comma.
        header: whether the first line is a header; None: it is guessed.
        skip_bad_rows: leave out rows that do not fit.
        say: a function of one line of text, by default to the error stream. It is told which rows
            are left out, which columns are not used, and the first row of a file that is taken to
            have no header.

    Raises:
        DataError: at the first row, or anything else, that does not fit.
    """
    say = say or tell
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    how = (columns, kind, delimiter, header)
    bad, store = [], Store(say)
    try:
        layout = _read_into(store, paths, how, bad if skip_bad_rows else None, say)
        if bad:
            more = "" if len(bad) <= _SHOWN else f" and {len(bad) - _SHOWN} more"
            say(f"left out {counted(len(bad), 'row')}: {'; '.join(bad[:_SHOWN])}{more}")
        return store.dataset(), layout
    except BaseException:  # Ctrl-C too
        store.discard()
        raise


def _read_into(store, paths, how, bad, say):
    """Put the rows of files with the same columns into a `Store`; their `Format`.

    how: columns, kind, delimiter, header of `read_data`. bad: the list of the rows left out, or
    None where there may be none.
    """
    columns, kind, delimiter, header = how
    last = None
    for one in paths:
        file, kind_here = (one, "hub") if is_hub(one) else (check_file(one), None)
        kind_here = kind_here or kind_of(file, kind)
        roles = parse_columns(columns)
        if kind_here in ("csv", "tsv"):
            opened = open_delimited(file, kind_here, roles, delimiter, header, say)
        elif kind_here in ("hub", "parquet"):
            opened = open_tables(file, kind_here, roles)
        else:
            opened = open_named(file, kind_here, roles)
        places, parts, names = opened
        try:
            layout = format_of(places)
        except ValueError as error:
            raise DataError(f"{file}: {header_fault(error, names)}") from error
        used = [places[column] for column in layout.columns]
        if unused := [name for place, name in enumerate(names) if place not in used]:
            say(f"{file}: columns not used: {', '.join(unused)}")
        if last is not None and layout != last:
            raise DataError(f"{file}: wanted the columns of {paths[0]}, {last.columns}")
        last = layout
        store.begin(layout)
        count = store.rows
        for part in parts(file, layout, bad):
            store.add(part)
        if store.rows == count:
            raise DataError(f"{file}: no rows")
    return last


def _named_fields(path, kind, delimiter, header):
    """(where, {column: field}) of each row of a CSV or TSV file; without a header all is `text`."""
    rows = sound(delimited_rows(path, kind, delimiter if kind == "csv" else None))
    names = ["text"]
    if header is not False:
        names = [field.strip() for field in next(rows, (None, []))[1]]
    check_header(names, ["text"], path)
    for where, row in rows:
        if fault := width_fault(row, len(names), path, where):
            raise fault
        yield where, dict(zip(names, row, strict=True))


def read_corpus(path, *, kind=None, delimiter=None, header=None):
    """The texts of a file: each line of .txt, else the column `text` (`DataError` as above).

    kind: of a file whose suffix does not say. delimiter: of a CSV file. header: False where a CSV
    or TSV file has none, and texts alone.
    """
    path = path if is_hub(path) else check_file(path)
    if not is_hub(path) and suffix_of(path) == ".txt":
        texts = [
            checked_text(text.strip(), "text", path, f"line {line}")
            for line, text in lines(path)
            if text.strip()
        ]
    else:
        kind = "hub" if is_hub(path) else corpus_kind(path, kind)
        if kind == "hub":
            rows = hub_rows(path)
        elif kind in ("csv", "tsv"):
            rows = _named_fields(path, kind, delimiter, header)
        else:
            rows = sound(named_rows(path, kind))
        texts = []
        for where, row in rows:
            if "text" not in row:
                known = ", ".join(map(str, row)) or "nothing"
                raise DataError(f"{path}, {where}: no column text; it has {known}")
            texts.append(checked_text(row["text"], "text", path, where))
    if not texts:
        raise DataError(f"{path}: no texts")
    return texts
