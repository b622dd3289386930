"""Reading data files, strictly: a bad row stops with file, line and reason.

CSV, TSV, JSON lines and Parquet end as a `datasets.Dataset`. The rows themselves are read here
and not by `datasets`, whose readers take "NA" for a missing value, guess types, fill short rows
and know no line numbers. Texts are held in memory once while a file is read.
"""

import csv
import json
import math
from pathlib import Path

from fastsim.training.formats import describe, format_of, is_role

SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


class DataError(ValueError):
    """A data file that cannot be used; the message holds file, line and reason."""


def read_data(path, *, columns=None, kind=None):
    """A file as (datasets.Dataset of the columns in use, `Format`).

    path: CSV or TSV (UTF-8; TSV without quoting), JSON lines or Parquet, told by the suffix or
    `kind` ("csv", "tsv", "jsonl", "parquet"). columns: None, a header with the names of
    `formats.COLUMNS`; or a list of items `role`, `role=name in the header`, `_` (not used).
    Plain roles select from a header that has them all, else the file has no header and they name
    its columns in order. Scores become floats, labels stay text; in JSON and Parquet they may be
    numbers. `DataError` for anything that does not fit, at the first such row.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    kind = kind or SUFFIXES.get(path.suffix.lower())
    if kind not in SUFFIXES.values():
        raise DataError(f"{path}: wanted a suffix in {', '.join(SUFFIXES)}, or --format")
    roles = _parse_columns(columns, path)
    try:
        if kind in ("csv", "tsv"):
            names, rows = _open_delimited(path, kind, roles)
        else:
            names, rows = _open_named(path, kind, roles)
        return _collect(path, names, rows)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: wanted UTF-8 text: {error.reason}") from error


# ---- columns ----


def _parse_columns(columns, path):
    """A list of (role, name in the file or None), or None."""
    if columns is None:
        return None
    items = [item.strip() for item in (columns.split(",") if isinstance(columns, str) else columns)]
    parts = [item.partition("=") for item in items]
    roles = [(role.strip(), name.strip() or None) for role, _, name in parts]
    named = [role for role, _ in roles if role != "_"]
    for role in named:
        if not is_role(role):
            raise DataError(f"columns: wanted names in {describe()}, got {role!r}")
        if named.count(role) > 1:
            raise DataError(f"columns: {role!r} is named twice")
    mapped = [name is not None for _, name in roles]
    if any(mapped) and not all(mapped):
        raise DataError("columns: wanted role=name for all of them or for none")
    try:
        format_of(named)
    except ValueError as error:
        raise DataError(str(error)) from error
    return roles


def _select(header, roles, path):
    """Role -> position in a header."""
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}, line 1: column {name!r} is there twice")
    if roles is None:
        return {name: place for place, name in enumerate(header) if is_role(name)}
    wanted = [(role, name or role) for role, name in roles if role != "_"]
    missing = [name for _, name in wanted if name not in header]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)}; it has {', '.join(header)}")
    return {role: header.index(name) for role, name in wanted}


# ---- rows: (line, values in the order of names) ----


def _open_delimited(path, kind, roles):
    quoting = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {}
    lines = _delimited_rows(path, quoting)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    plain = roles is not None and all(name is None for _, name in roles)
    header = [field.strip() for field in first[1]]
    if plain and not all(role in header for role, _ in roles if role != "_"):
        places = {role: place for place, (role, _) in enumerate(roles) if role != "_"}
        return list(places), _pick(path, _again(first, lines), list(places.values()), len(roles))
    places = _select(header, roles, path)
    return list(places), _pick(path, lines, list(places.values()), len(header))


def _delimited_rows(path, quoting):
    with open(path, encoding="utf-8-sig", newline="") as handle:
        reader = csv.reader(handle, strict=True, **quoting)
        line = 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{path}, line {line + 1}: {error}") from error
            if row is None:
                return
            start, line = line + 1, reader.line_num
            if row:  # an empty line ends many files and holds no row
                yield start, row


def _again(first, rest):
    yield first
    yield from rest


def _pick(path, rows, places, width):
    for line, row in rows:
        if len(row) != width:
            raise DataError(f"{path}, line {line}: wanted {width} fields, got {len(row)}")
        yield line, [row[place] for place in places]


def _open_named(path, kind, roles):
    rows = _json_rows(path) if kind == "jsonl" else _parquet_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    header = list(first[1])
    names = _select(header, roles, path)
    keys = [header[place] for place in names.values()]

    def values():
        for line, row in _again(first, rows):
            missing = [key for key in keys if row.get(key) is None]
            if missing:
                raise DataError(f"{path}, line {line}: no {', '.join(missing)}")
            yield line, [row[key] for key in keys]

    return list(names), values()


def _json_rows(path):
    with open(path, encoding="utf-8-sig") as handle:
        for line, text in enumerate(handle, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path}, line {line}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {line}: wanted a JSON object, got {text[:40]!r}")
            yield line, row


def _parquet_rows(path):
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: no Parquet: {error}") from error


# ---- checked columns ----


def _collect(path, names, rows):
    try:
        layout = format_of(names)
    except ValueError as error:
        raise DataError(f"{path}: {error}; --columns names them") from error
    values = {name: [] for name in layout.columns}
    for line, row in rows:
        for name, value in zip(names, row, strict=True):
            if name in layout.texts:
                values[name].append(_text(value, name, path, line))
            elif name in values:
                check = _score if name == "score" else _label
                values[name].append(check(value, name, path, line))
    if not values[layout.texts[0]]:
        raise DataError(f"{path}: no rows")
    import datasets

    return datasets.Dataset.from_dict(values), layout


def _text(value, name, path, line):
    if not isinstance(value, str):
        raise DataError(f"{path}, line {line}: {name}: wanted a text, got {value!r:.40}")
    if not value.strip():
        raise DataError(f"{path}, line {line}: {name}: the text is empty")
    return value


def _score(value, name, path, line):
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        hint = "; does the file have a header? Map it with --columns score=NAME,..."
        hint = hint if line == 1 and isinstance(value, str) else ""
        raise DataError(f"{path}, line {line}: {name}: wanted a number, got {value!r:.40}{hint}")
    return number


def _label(value, name, path, line):
    """A class as text; 1, 1.0 and "1" are one class."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int)) or not str(value).strip():
        raise DataError(f"{path}, line {line}: {name}: wanted a class, got {value!r:.40}")
    return str(value).strip()


def read_corpus(path):
    """The texts of a file: each line of .txt, else the column `text` (`DataError` as above)."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix.lower() == ".txt":
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: wanted UTF-8 text: {error.reason}") from error
        texts = [line.strip() for line in lines if line.strip()]
        if not texts:
            raise DataError(f"{path}: no texts")
        return texts
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{path}: wanted a suffix in .txt, {', '.join(SUFFIXES)}")
    if kind in ("csv", "tsv"):
        quoting = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {}
        lines = _delimited_rows(path, quoting)
        header = next(lines, (1, []))[1]
        rows = ((line, dict(zip(header, row, strict=False))) for line, row in lines)
    else:
        rows = _json_rows(path) if kind == "jsonl" else _parquet_rows(path)
    texts = []
    for line, row in rows:
        if "text" not in row:
            raise DataError(f"{path}, line {line}: no column text")
        texts.append(_text(row["text"], "text", path, line))
    if not texts:
        raise DataError(f"{path}: no texts")
    return texts
