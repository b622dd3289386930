"""Reads the rows of data files: CSV, TSV, JSON lines and JSON, plain or gzip, and Parquet.

Each row comes with its location: "line 3", or "row 3" in JSON and Parquet. The readers of
`datasets` are not used: they read "NA" as a missing value, guess types, fill up short rows and know
no line numbers.
"""

import csv
import gzip
import itertools
import json
import os
import stat
import zlib
from pathlib import Path

SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
KINDS = tuple(dict.fromkeys(SUFFIXES.values()))
_CONFUSED = {"csv", "tsv"}, {"json", "jsonl"}  # kinds whose suffixes are often confused
UNPACKING = (gzip.BadGzipFile, EOFError, zlib.error)  # what gzip raises
_SIGNATURES = {  # first bytes of a file -> what it is
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "compressed by gzip; give it a name that ends in .gz",
}


class DataError(ValueError):
    """A data file that cannot be used; the message has the file, the line and the reason."""


def check_file(path):
    """The path of an existing file; `DataError` if there is none."""
    if "://" in str(path):
        raise DataError(f"{path}: wanted a file on this machine, got a URL; download it first")
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # a NUL in the name
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        raise DataError(f"{path}: wanted a file, got a directory")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path}: wanted a regular file, which can be read twice, got a pipe or device"
        )
    return path


def _unreadable(path, error):
    """An OSError as `DataError`: an OSError would be reported as an error of the output."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}")


def suffix_of(path):
    """The last suffix of a file except `.gz`, in lower case, or ""."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def kind_of(path, kind=None):
    """The kind of a file: `kind`, which applies to all files of a command, or that of the suffix.

    `DataError` if `kind` contradicts the suffix, unless the suffixes of both are often confused.
    """
    by_suffix = SUFFIXES.get(suffix_of(path))
    kind = kind or by_suffix
    if kind not in KINDS:
        raise DataError(f"{path}: wanted a suffix in {', '.join(SUFFIXES)}, or --format")
    if by_suffix not in (None, kind) and {by_suffix, kind} not in _CONFUSED:
        raise DataError(
            f"{path}: wanted {kind}, since --format applies to all data files, got the suffix of"
            f" {by_suffix}; without --format each file is read by its suffix"
        )
    return kind


def corpus_kind(path, kind=None):
    """The kind of a file of texts other than .txt: that of its suffix, or `kind` without one.

    The suffix takes precedence, as `kind` is meant for the pairs. The message names no option, as
    `search` has none.
    """
    kind = SUFFIXES.get(suffix_of(path), kind)
    if kind not in KINDS:
        raise DataError(f"{path}: wanted a suffix in {', '.join((*SUFFIXES, '.txt'))}")
    return kind


def dialect(kind, delimiter=None):
    """The options of `csv.reader` for a kind. TSV has no quotes; the delimiter \\t is a tab."""
    quoting = csv.QUOTE_NONE if kind == "tsv" else csv.QUOTE_MINIMAL
    if delimiter is None:
        delimiter = "\t" if kind == "tsv" else ","
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise DataError(f"delimiter: wanted one character, or \\t for a tab, got {delimiter!r}")
    return {"delimiter": delimiter, "quoting": quoting}


def raise_malformed(rows):
    """The rows; raises the `DataError` of the first malformed one."""
    for where, row in rows:
        if isinstance(row, DataError):
            raise row
        yield where, row


def delimited_rows(path, kind, delimiter=None):
    """(where, fields) of each row of a CSV or TSV file; (where, `DataError`) of a malformed one.

    The error names all lines that were read as one row: after an unclosed quote these are the lines
    up to the next quote, or up to the end of the file.
    """
    csv.field_size_limit(2**31 - 1)  # a text may be as long as a book
    with _text(path) as handle:
        reader = csv.reader(handle, strict=True, **dialect(kind, delimiter))
        line = 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                row = error
            if row is None:
                return
            start, line = line + 1, reader.line_num
            if isinstance(row, csv.Error):
                where = f"lines {start} to {line}" if line > start else f"line {start}"
                yield where, DataError(f"{path}, {where}: {row}")
            elif row:  # not an empty line, as at the end of many files
                yield f"line {start}", row


def width_fault(row, width, path, where, hint=""):
    """The `DataError` of a malformed row, or of one with the wrong number of fields; else None.

    hint: added to the message if there are too many fields.
    """
    if isinstance(row, DataError):
        return row
    if len(row) == width:
        return None
    text = f"{path}, {where}: wanted {width} fields, got {len(row)}"
    return DataError(text + (hint if len(row) > width else other_delimiter(row, width)))


def other_delimiter(row, width=None):
    """A hint if another delimiter splits a row of one field: into `width` fields, if given."""
    if len(row) != 1:
        return ""
    counts = {mark: row[0].count(mark) for mark in (";", "\t", "|", ",")}
    mark = max(counts, key=counts.get)
    fits = counts[mark] if width is None else counts[mark] == width - 1
    return f"; try --delimiter {mark!r}" if fits else ""


def named_rows(path, kind):
    """(where, {column: value}) of each row of a JSON or Parquet file, or (where, `DataError`)."""
    return {"jsonl": _json_lines, "json": _json_list, "parquet": _parquet}[kind](path)


def lines(path):
    """(line, text) of each line of a text file."""
    with _text(path) as handle:
        yield from enumerate(handle, start=1)


def numbered(rows, start=1):
    """(where, row) of each row, numbered from `start`."""
    for number, row in enumerate(rows, start):
        yield f"row {number}", row


def _json_lines(path):
    for line, text in lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            row = DataError(f"{path}, line {line}: not JSON: {error}")
        else:
            row = _object(row, f"{path}, line {line}")
        yield f"line {line}", row


def _json_list(path):
    with _text(path) as handle:
        try:
            rows = json.load(handle)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}; JSON lines end in .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: wanted a JSON list of objects, got {rows!r:.40}")
    for where, row in numbered(rows):
        yield where, _object(row, f"{path}, {where}")


def _object(row, place):
    if isinstance(row, dict):
        return row
    return DataError(f"{place}: wanted a JSON object, got {row!r:.40}")


def _parquet(path):
    parts = (table.to_pylist() for table in parquet_tables(path))
    yield from numbered(itertools.chain.from_iterable(parts))


def parquet_tables(path):
    """The rows of a Parquet file as Arrow tables of up to 10,000."""
    if path.suffix.lower() == ".gz":  # Parquet is read from its end
        raise DataError(
            f"{path}: wanted Parquet without gzip, as it is already compressed, got a .gz file;"
            " unpack it with gunzip"
        )
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(10_000):
            yield pyarrow.Table.from_batches([batch])
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise _unreadable(path, error) from error  # errors of Arrow itself have no errno
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not Parquet, or damaged: {reason}") from error


def open_bytes(path):
    """A file opened for its bytes, unpacked if it is gzip."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


class _text:  # noqa: N801 - used as `with _text(path)`
    """A text file opened as UTF-8.

    Bytes that are not UTF-8 raise `DataError` with their line; faults found by the system or by
    gzip raise it without a line.
    """

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        opener = gzip.open if self.path.suffix.lower() == ".gz" else open
        try:
            self.handle = opener(self.path, "rt", encoding="utf-8-sig", newline="")
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return self.handle

    def __exit__(self, kind, error, trace):
        self.handle.close()
        try:
            if isinstance(error, UnicodeDecodeError):
                raise DataError(_encoding_fault(self.path)) from error
            if isinstance(error, UNPACKING):
                raise error
        except UNPACKING as fault:
            raise DataError(f"{self.path}: not a complete gzip file: {fault}") from error
        if isinstance(error, OSError):
            raise _unreadable(self.path, error) from error


def _encoding_fault(path):
    """The message for the first line that is not UTF-8, with what the file seems to be."""
    with open_bytes(path) as handle:
        for number, line in enumerate(handle, start=1):
            if number == 1 and line[:2] in _SIGNATURES:
                kind = _SIGNATURES[line[:2]]
                return f"{path}, line 1: wanted UTF-8 text, got what seems to be {kind}"
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f"{path}, line {number}: wanted UTF-8 text, got 0x{byte:02x} as byte"
                    f" {error.start + 1} of the line; Windows-1252 (Latin-1) is likely:"
                    f" iconv -f WINDOWS-1252 -t UTF-8 {os.fspath(path)}"
                )
    return f"{path}: wanted UTF-8 text"
