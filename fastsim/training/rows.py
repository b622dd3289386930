"""Rows of data files: CSV, TSV, JSON lines and JSON, plain or gzip, and Parquet.

Each comes with where it stands: "line 3", or "row 3" in JSON and Parquet.
The rows are read here and not by `datasets`, whose readers take "NA" for a missing value, guess
types, fill short rows and know no line numbers.
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
_MIXED_UP = {"csv", "tsv"}, {"json", "jsonl"}  # files of one are named as of the other
UNPACKING = (gzip.BadGzipFile, EOFError, zlib.error)  # what gzip raises
_MARKS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "compressed by gzip; give it a name that ends in .gz",
}


class DataError(ValueError):
    """A data file that cannot be used; the message holds file, line and reason."""


def check_file(path):
    """The path of a file that is there, or `DataError`."""
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
        raise DataError(f"{path}: wanted a file, this is a directory")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path}: wanted a regular file, which can be read twice, got a pipe or device"
        )
    return path


def _unreadable(path, error):
    """What the system says of a file; as an OSError it would be taken for one of the output."""
    return DataError(f"{path}: cannot be read: {error.strerror or error}")


def suffix_of(path):
    """The last suffix of a file, in lower case, `.gz` aside; "" where there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def kind_of(path, kind=None):
    """The kind of a file by its suffix, or as given for all files of a command.

    What is given may correct the suffix, but not name a kind that the file cannot be.
    """
    named = SUFFIXES.get(suffix_of(path))
    kind = kind or named
    if kind not in KINDS:
        raise DataError(f"{path}: wanted a suffix in {', '.join(SUFFIXES)}, or --format")
    if named not in (None, kind) and {named, kind} not in _MIXED_UP:
        raise DataError(
            f"{path}: wanted {kind}, as --format says of all data files; the suffix says {named}."
            " Without --format each file is read as its suffix says"
        )
    return kind


def corpus_kind(path, kind=None):
    """That of a file of texts, where it is not .txt: as given where its suffix does not say.

    What is given is of the pairs beside it first. No option is named: `search` has none for it.
    """
    kind = SUFFIXES.get(suffix_of(path), kind)
    if kind not in KINDS:
        raise DataError(f"{path}: wanted a suffix in {', '.join((*SUFFIXES, '.txt'))}")
    return kind


def dialect(kind, delimiter=None):
    """The options of `csv.reader` for a kind: TSV has no quotes; \\t is a tab."""
    quoting = csv.QUOTE_NONE if kind == "tsv" else csv.QUOTE_MINIMAL
    if delimiter is None:
        delimiter = "\t" if kind == "tsv" else ","
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise DataError(f"delimiter: wanted one character, or \\t for a tab, got {delimiter!r}")
    return {"delimiter": delimiter, "quoting": quoting}


def sound(rows):
    """Rows, but raise the first that is malformed."""
    for where, row in rows:
        if isinstance(row, DataError):
            raise row
        yield where, row


def delimited_rows(path, kind, delimiter=None):
    """(where, fields) of each row of a CSV or TSV file; a `DataError` in place of malformed fields.

    It names the lines that were read as one row: a quote that is not closed takes those up to the
    next quote, or up to the end of the file.
    """
    csv.field_size_limit(2**31 - 1)  # a text may be a book
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
            elif row:  # an empty line ends many files and holds no row
                yield f"line {start}", row


def width_fault(row, width, path, where):
    """What is wrong with a row, malformed or of too few or too many fields: `DataError` or None."""
    if isinstance(row, DataError):
        return row
    if len(row) == width:
        return None
    text = f"{path}, {where}: wanted {width} fields, got {len(row)}"
    return DataError(text + other_delimiter(row, width))


def other_delimiter(row, width=None):
    """A hint where a row of one field would have several, `width` if given, by another sign."""
    if len(row) != 1:
        return ""
    counts = {mark: row[0].count(mark) for mark in (";", "\t", "|", ",")}
    mark = max(counts, key=counts.get)
    fits = counts[mark] if width is None else counts[mark] == width - 1
    return f"; try --delimiter {mark!r}" if fits else ""


def named_rows(path, kind):
    """(where, {column: value}) of each row of a JSON or Parquet file, or a `DataError` in place."""
    return {"jsonl": _json_lines, "json": _json_list, "parquet": _parquet}[kind](path)


def lines(path):
    """(line, text) of each line of a text file."""
    with _text(path) as handle:
        yield from enumerate(handle, start=1)


def numbered(rows, start=1):
    """(where, row) of each row, counted from `start`."""
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
    if path.suffix.lower() == ".gz":  # to be read from its end, it would be unpacked many times
        raise DataError(
            f"{path}: wanted Parquet as it is, which is compressed within, got it packed by gzip;"
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
            raise _unreadable(path, error) from error  # what Arrow finds has no number
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not Parquet, or damaged: {reason}") from error


def open_bytes(path):
    """The bytes of a file, unpacked where it is gzip."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


class _text:  # noqa: N801 - used as `with _text(path)`
    """A text file opened as UTF-8; bytes that are none become a `DataError` with their line.

    So does what the system or gzip finds wrong with the file, without a line.
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
    """The first line that is no UTF-8 and what the file seems to be."""
    with open_bytes(path) as handle:
        for number, line in enumerate(handle, start=1):
            if number == 1 and line[:2] in _MARKS:
                return f"{path}, line 1: wanted UTF-8 text, this seems to be {_MARKS[line[:2]]}"
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return (
                    f"{path}, line {number}: wanted UTF-8 text, byte {error.start + 1} of the line"
                    f" is 0x{byte:02x}; Windows-1252 (Latin-1) is likely:"
                    f" iconv -f WINDOWS-1252 -t UTF-8 {os.fspath(path)}"
                )
    return f"{path}: wanted UTF-8 text"
