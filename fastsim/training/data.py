"""Reading data files, strictly: a bad row stops with file, line and reason.

What is in Arrow already (Parquet, the hub) is looked at by columns, the rest by rows; the rows end
as a `datasets.Dataset` (fastsim/training/store.py).
"""

import functools
import itertools
import math
import os
import re
import sys

from fastsim.training.blocks import delimited_tables
from fastsim.training.formats import describe, format_of, is_role
from fastsim.training.hub import is_hub
from fastsim.training.hub import rows as hub_rows
from fastsim.training.hub import tables as hub_tables
from fastsim.training.rows import (
    KINDS,
    SUFFIXES,
    DataError,
    check_file,
    delimited_rows,
    kind_of,
    lines,
    named_rows,
    parquet_tables,
)
from fastsim.training.store import Store

__all__ = ["KINDS", "SUFFIXES", "DataError", "read_corpus", "read_data"]

_PART = 10_000  # rows checked and written at once
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

    path: CSV or TSV (UTF-8; TSV without quoting), JSON lines, JSON or Parquet, plain or gzip, told
    by the suffix or `kind`; or a data set on the hub (`fastsim.training.hub`); or a list of such
    with the same columns. columns: None, a header
    with the names of `formats.COLUMNS`; or a list of items `role`, `role=name in the header`, `_`
    (not used). Plain roles select from a header that has them all, else the file has no header and
    they name its columns in order; header says so where that is not to be guessed. delimiter: of a
    CSV file, by default a comma. skip_bad_rows: leave out rows that do not fit, and say (a
    function, by default to the error stream) how many and which. Scores become floats, labels stay
    text; in JSON and Parquet they may be numbers. `DataError` for anything that does not fit, at
    the first such row.
    """
    say = say or _tell
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    bad, last = [], None
    store = None
    for one in paths:
        file, kind_here = (one, "hub") if is_hub(one) else (check_file(one), None)
        kind_here = kind_here or kind_of(file, kind)
        roles = _parse_columns(columns)
        if kind_here in ("csv", "tsv"):
            names, parts, found = _open_delimited(file, kind_here, roles, delimiter, header)
        elif kind_here in ("hub", "parquet"):
            names, parts, found = _open_tables(file, kind_here, roles)
        else:
            names, parts, found = _open_named(file, kind_here, roles)
        try:
            layout = format_of(names)
        except ValueError as error:
            raise DataError(f"{file}: {_header_fault(error, found)}") from error
        if last is not None and layout != last:
            raise DataError(f"{file}: wanted the columns of {paths[0]}, {last.columns}")
        last = layout
        store = store or Store(layout, say)
        count = store.rows
        for part in parts(file, layout, bad if skip_bad_rows else None):
            store.add(part)
        if store.rows == count:
            raise DataError(f"{file}: no rows")
    if bad:
        more = "" if len(bad) <= _SHOWN else f" and {len(bad) - _SHOWN} more"
        say(f"left out {len(bad)} rows: {'; '.join(bad[:_SHOWN])}{more}")
    return store.dataset(), last


def _tell(line):
    print(line, file=sys.stderr, flush=True)


# ---- columns ----


def _parse_columns(columns):
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
        raise DataError(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(header)}"
            f"{_other_delimiter(header)}"
        )
    return {role: header.index(name) for role, name in wanted}


def _header_fault(error, header):
    return (
        f"{error}; the header is ({', '.join(header)}); --columns role=name,... maps it"
        f"{_other_delimiter(header)}"
    )


def _other_delimiter(header):
    if len(header) != 1:
        return ""
    counts = {mark: header[0].count(mark) for mark in (";", "\t", "|", ",")}
    mark = max(counts, key=counts.get)
    return f"; try --delimiter {mark!r}" if counts[mark] else ""


def _looks_like_a_header(first, second):
    """Whether fields are short distinct names and those of the next row are not."""
    name = re.compile(r"[A-Za-z_][\w .-]{0,29}")
    named = all(name.fullmatch(field) and len(field.split()) <= 2 for field in first)
    if not named or len(set(first)) < len(first) or second is None:
        return False
    return any(len(field.split()) > 3 for field in second)


# ---- files opened: the names of their columns in use, their parts as below, the header found ----
# Rows are (line, values in the order of names, or what is wrong with the row).


def _open_delimited(path, kind, roles, delimiter, header):
    rows = delimited_rows(path, kind, delimiter)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    names = [field.strip() for field in first[1]]
    plain = roles is not None and all(name is None for _, name in roles)
    has_all = plain and all(role in names for role, _ in roles if role != "_")
    if plain and not has_all and header is not True:
        second = next(rows, None)
        if header is None and _looks_like_a_header(names, second and second[1]):
            shown = ",".join(
                f"{role}={name}"
                for (role, _), name in zip(roles, names, strict=False)
                if role != "_"
            )
            raise DataError(
                f"{path}, line 1: this looks like a header: {', '.join(names)}. Map it with"
                f" --columns {shown}, or say --no-header"
            )
        places = {role: place for place, (role, _) in enumerate(roles) if role != "_"}
        rows = _again([first] if second is None else [first, second], rows)
        width, headers = len(roles), 0
    elif header is False:
        raise DataError(f"{path}: without a header wanted --columns with plain roles")
    else:
        places = _select(names, roles, path)
        width, headers = len(names), 1
    wanted = list(places.values())
    tables = delimited_tables(path, kind, delimiter, width, wanted, skip=headers)
    rows = _pick(path, rows, wanted, width)
    return list(places), functools.partial(_delimited_parts, places, tables, rows), names


def _again(first, rest):
    yield from first
    yield from rest


def _pick(path, rows, places, width):
    for line, row in rows:
        if len(row) != width:
            yield line, DataError(f"{path}, line {line}: wanted {width} fields, got {len(row)}")
        else:
            yield line, [row[place] for place in places]


def _open_named(path, kind, roles):
    rows = named_rows(path, kind)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    header = list(first[1])
    names = _select(header, roles, path)
    keys = [header[place] for place in names.values()]
    rows = _of_keys(path, keys, _again([first], rows))
    return list(names), functools.partial(_row_parts, list(names), rows), header


def _of_keys(path, keys, rows):
    for line, row in rows:
        missing = [key for key in keys if row.get(key) is None]
        if missing:
            yield line, DataError(f"{path}, line {line}: no {', '.join(missing)}")
        else:
            yield line, [row[key] for key in keys]


def _open_tables(path, kind, roles):
    tables = hub_tables(path) if kind == "hub" else parquet_tables(path)
    first = next(tables, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    header = first.column_names
    places = _select(header, roles, path)
    keys = {name: header[place] for name, place in places.items()}
    return list(keys), functools.partial(_table_parts, keys, _again([first], tables)), header


# ---- parts: checked columns, some rows at a time, for (path, format, rows left out or None) ----


def _row_parts(names, rows, path, layout, bad):
    places = [names.index(name) for name in layout.columns]
    while part := list(itertools.islice(rows, _PART)):
        yield _checked(path, part, places, layout, bad)


def _table_parts(keys, tables, path, layout, bad):
    from fastsim.training.tables import checked_columns  # wants Arrow, which rows alone do not

    wanted, count = list(keys.values()), 1
    for table in tables:
        columns = checked_columns(table, keys, layout)
        if columns is not None:
            yield columns
        else:
            rows = enumerate(table.select(wanted).to_pylist(), start=count)
            yield from _row_parts(list(keys), _of_keys(path, wanted, rows), path, layout, bad)
        count += len(table)


def _delimited_parts(places, tables, rows, path, layout, bad):
    """Arrow's tables while nothing is wrong with them; the rest by rows, which say what is."""
    from fastsim.training.tables import checked_columns

    keys, done = {name: str(place) for name, place in places.items()}, 0
    for table in tables:
        columns = None if table is None else checked_columns(table, keys, layout)
        if columns is None:
            break
        yield columns
        done += len(table)
    else:
        return
    for columns in _row_parts(list(places), rows, path, layout, bad):
        again = min(done, len(columns[0]))
        done -= again
        yield [column[again:] for column in columns]


# ---- checked columns ----


def _checked(path, part, places, layout, bad):
    """The columns of some rows; rows that do not fit are told to `bad`, or raised if it is None."""
    quick = _checked_together([row for _, row in part], places, layout)
    if quick is not None:
        return quick
    kept = []
    for line, row in part:
        try:
            if isinstance(row, DataError):
                raise row
            kept.append(
                [
                    _value(row[place], name, layout, path, line)
                    for place, name in zip(places, layout.columns, strict=True)
                ]
            )
        except DataError as error:
            if bad is None:
                raise
            bad.append(str(error))
    return list(zip(*kept, strict=True)) or [() for _ in places]


def _checked_together(rows, places, layout):
    """The columns, where a look at whole columns finds nothing wrong, else None."""
    if DataError in set(map(type, rows)):
        return None
    given = list(zip(*rows, strict=True))
    columns = []
    for place, name in zip(places, layout.columns, strict=True):
        values = given[place]
        kinds = set(map(type, values))
        if name in layout.texts:
            if kinds != {str} or not all(map(str.strip, values)) or any("\0" in v for v in values):
                return None
        elif name == "score" and kinds <= {str, int, float}:
            try:
                values = list(map(float, values))
            except ValueError:
                return None
            if not all(map(math.isfinite, values)):
                return None
        else:
            return None
        columns.append(values)
    return columns


def _value(value, name, layout, path, line):
    if name in layout.texts:
        return _text(value, name, path, line)
    return (_score if name == "score" else _label)(value, name, path, line)


def _text(value, name, path, line):
    if not isinstance(value, str):
        raise DataError(f"{path}, line {line}: {name}: wanted a text, got {value!r:.40}")
    if not value.strip():
        raise DataError(f"{path}, line {line}: {name}: the text is empty")
    if "\0" in value:
        raise DataError(f"{path}, line {line}: {name}: the text holds a NUL byte")
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
    path = path if is_hub(path) else check_file(path)
    if not is_hub(path) and path.suffixes and path.suffixes[0].lower() == ".txt":
        texts = [text.strip() for _, text in lines(path) if text.strip()]
    else:
        kind = "hub" if is_hub(path) else kind_of(path, more=(".txt",))
        if kind == "hub":
            rows = hub_rows(path)
        elif kind in ("csv", "tsv"):
            rows = delimited_rows(path, kind)
            header = next(rows, (1, []))[1]
            rows = ((line, dict(zip(header, row, strict=False))) for line, row in rows)
        else:
            rows = named_rows(path, kind)
        texts = []
        for line, row in rows:
            if "text" not in row:
                known = ", ".join(map(str, row)) or "nothing"
                raise DataError(f"{path}, line {line}: no column text; it has {known}")
            texts.append(_text(row["text"], "text", path, line))
    if not texts:
        raise DataError(f"{path}: no texts")
    return texts
