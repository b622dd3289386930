"""Reads data files strictly: a malformed row is an error with the file, the line and the reason.

Arrow data (Parquet, the hub) are checked by column, other data by row. The result is a
`datasets.Dataset` (fastsim/training/store.py).
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
    raise_malformed,
    suffix_of,
    width_fault,
)
from fastsim.training.store import Store
from fastsim.training.values import checked_text

__all__ = ["KINDS", "SUFFIXES", "DataError", "read_corpus", "read_data"]

_SHOWN = 3  # skipped rows that are named


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
    """(datasets.Dataset of the columns in use, `Format`) of a file or several.

    Scores become floats. Labels become text; in JSON and Parquet they may be numbers.

    Args:
        path: a CSV or TSV file (UTF-8; TSV without quoting), JSON lines or JSON, plain or gzip; a
            Parquet file; a data set on the hub (`fastsim.training.hub`); or a list of these with
            the same columns.
        columns: a list of items `role`, `role=name in the header`, or `_` (not used); None: the
            header has the names of `formats.COLUMNS`. Plain roles select from a header that has
            them all; otherwise the file has no header, and they name its columns in order.
        kind: the format of the files, by default given by their suffixes.
        delimiter: of CSV files, by default a comma.
        header: whether the first line is a header; None: it is guessed.
        skip_bad_rows: whether to skip malformed rows.
        say: a function of one line of text, by default to the error stream. It is called for
            skipped rows, for columns that are not used, and for the first row of a file that is
            taken to have no header.

    Raises:
        DataError: for the first malformed row, and for anything else that does not fit.
    """
    say = say or tell
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    reading = (columns, kind, delimiter, header)
    bad, store = [], Store(say)
    try:
        layout = _read_into(store, paths, reading, bad if skip_bad_rows else None, say)
        if bad:
            say(_skipped(bad))
        return store.dataset(), layout
    except BaseException:  # including Ctrl-C
        store.discard()
        raise


def _read_into(store, paths, reading, bad, say):
    """Put the rows of files with the same columns into a `Store`, and return their `Format`.

    reading: columns, kind, delimiter and header of `read_data`. bad: a list for the faults of
    skipped rows; None: a fault is raised.
    """
    columns, kind, delimiter, header = reading
    last = None
    for path in paths:
        if is_hub(path):
            file, file_kind = path, "hub"
        else:
            file = check_file(path)
            file_kind = kind_of(file, kind)
        roles = parse_columns(columns)
        if file_kind in ("csv", "tsv"):
            opened = open_delimited(file, file_kind, roles, delimiter, header, say)
        elif file_kind in ("hub", "parquet"):
            opened = open_tables(file, file_kind, roles)
        else:
            opened = open_named(file, file_kind, roles)
        try:
            layout = format_of(opened.places)
        except ValueError as error:
            raise DataError(f"{file}: {header_fault(error, opened.header)}") from error
        used = [opened.places[column] for column in layout.columns]
        if unused := [name for place, name in enumerate(opened.header) if place not in used]:
            names = ", ".join(name or "(no name)" for name in unused)
            say(f"{file}: columns not used: {names}")
        if last is not None and layout != last:
            raise DataError(
                f"{file}: wanted the columns of {paths[0]} ({', '.join(last.columns)}), got"
                f" ({', '.join(layout.columns)})"
            )
        last = layout
        store.begin(layout)
        count = store.rows
        for part in opened.parts(file, layout, bad):
            store.add(part)
        if store.rows == count:
            why = f"; {_skipped(bad)}" if bad else ""
            raise DataError(f"{file}: wanted at least one row, got none{why}")
    return last


def _skipped(bad):
    more = "" if len(bad) <= _SHOWN else f" and {len(bad) - _SHOWN} more"
    return f"skipped {counted(len(bad), 'row')}: {'; '.join(bad[:_SHOWN])}{more}"


def _named_fields(path, kind, delimiter, header):
    """(where, {column: field}) of each row of a CSV or TSV file; without header: `text`."""
    rows = raise_malformed(delimited_rows(path, kind, delimiter if kind == "csv" else None))
    names = ["text"]
    if header is not False:
        names = [field.strip() for field in next(rows, (None, []))[1]]
    check_header(names, ["text"], path)
    for where, row in rows:
        if fault := width_fault(row, len(names), path, where):
            raise fault
        yield where, dict(zip(names, row, strict=True))


def read_corpus(path, *, kind=None, delimiter=None, header=None):
    """The texts of a file: the lines of a .txt file, else the column `text`; may raise `DataError`.

    kind: for a file whose suffix names no kind. delimiter: of a CSV file. header: False for a CSV
    or TSV file that has no header and only a column of texts.
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
            rows = raise_malformed(named_rows(path, kind))
        texts = []
        for where, row in rows:
            if "text" not in row:
                names = ", ".join(map(str, row)) or "nothing"
                raise DataError(f"{path}, {where}: wanted a column text, got {names}")
            texts.append(checked_text(row["text"], "text", path, where))
    if not texts:
        raise DataError(f"{path}: wanted at least one text, got none")
    return texts
