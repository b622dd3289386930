"""Opens data files: finds their columns, and reads their rows in parts.

A row is (where, values), or (where, `DataError`) if it is malformed.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from fastsim.training.blocks import delimited_tables
from fastsim.training.columns import check_no_header, select
from fastsim.training.formats import is_role
from fastsim.training.hub import tables as hub_tables
from fastsim.training.rows import (
    DataError,
    delimited_rows,
    named_rows,
    numbered,
    parquet_tables,
    width_fault,
)
from fastsim.training.values import checked_rows

_PART = 10_000  # rows checked and written at a time
_ALL_NAMED = "; --columns has a name for each field, and `_` for one that is not used"


class Opened(NamedTuple):
    """An open data file.

    places: {column: its place in the header}.
    parts: a function parts(path, format, bad) that yields the checked columns of some rows at a
        time. bad: a list for the faults of skipped rows; None: a fault is raised.
    header: the names of all columns; empty without a header.
    """

    places: dict
    parts: Callable
    header: list


def open_delimited(path, kind, roles, delimiter, header, say):
    """Open a CSV or TSV file. say: called if the first line is taken to be a row, not a header."""
    rows = delimited_rows(path, kind, delimiter)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: wanted at least one row, got none")
    if isinstance(first[1], DataError):  # it may be the header
        raise first[1]
    names = [field.strip() for field in first[1]]
    roles_alone = roles is not None and all(name is None for _, name in roles)
    has_all = roles_alone and all(role in names for role, _ in roles if role != "_")
    if roles_alone and not has_all and header is not True:
        second = next(rows, None)
        if header is None:
            check_no_header(names, roles, second and second[1], path)
            pairs = zip((role for role, _ in roles), names, strict=False)
            shown = ", ".join(f"{role} {name!r:.40}" for role, name in pairs if role != "_")
            say(f"{path}: read as a file without a header; line 1 is a row: {shown}")
        places = {role: place for place, (role, _) in enumerate(roles) if role != "_"}
        rows = itertools.chain([first] if second is None else [first, second], rows)
        width, headers, names = len(roles), 0, []
    elif header is False and has_all:
        raise DataError(f"{path}: line 1 has the names of the columns, so leave out --no-header")
    elif header is False:
        raise DataError(f"{path}: wanted --columns without = for a file without a header")
    else:
        places = select(names, roles, path)
        width, headers = len(names), 1
    used = list(places.values())
    tables = delimited_tables(path, kind, delimiter, width, set(used), skip=headers)
    rows = _select_places(path, rows, used, width, "" if headers else _ALL_NAMED)
    return Opened(places, functools.partial(_delimited_parts, places, tables, rows), names)


def _select_places(path, rows, places, width, hint):
    """The values at these places of rows of `width` fields. hint: for a row with more fields."""
    for where, row in rows:
        fault = width_fault(row, width, path, where, hint)
        yield where, fault or [row[place] for place in places]


def open_named(path, kind, roles):
    """Open a JSON file, whose rows are dictionaries."""
    rows = named_rows(path, kind)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: wanted at least one row, got none")
    if isinstance(first[1], DataError):  # it should name the columns
        raise first[1]
    header = list(first[1])
    places = select(header, roles, path)
    keys = [header[place] for place in places.values()]
    known = set(header) if roles is None else None
    rows = _select_keys(path, keys, itertools.chain([first], rows), known)
    return Opened(places, functools.partial(_row_parts, list(places), rows), header)


def _select_keys(path, keys, rows, known=None):
    """The values of these keys. known: the only roles that rows may have; None: any."""
    for where, row in rows:
        if isinstance(row, DataError):
            yield where, row
            continue
        missing = [key for key in keys if row.get(key) is None]
        has_more = known is not None and not row.keys() <= known
        if has_more and (new := [name for name in row if name not in known and is_role(name)]):
            yield (
                where,
                DataError(
                    f"{path}, {where}: wanted the columns of the first row, got {new[0]} too;"
                    " name those in use with --columns"
                ),
            )
        elif missing:
            yield where, DataError(f"{path}, {where}: no {', '.join(missing)}")
        else:
            yield where, [row[key] for key in keys]


def open_tables(path, kind, roles):
    """Open a Parquet file or a data set on the hub as Arrow tables."""
    tables = hub_tables(path) if kind == "hub" else parquet_tables(path)
    first = next(tables, None)
    if first is None:
        raise DataError(f"{path}: wanted at least one row, got none")
    header = first.column_names
    places = select(header, roles, path)
    keys = {name: header[place] for name, place in places.items()}
    parts = functools.partial(_table_parts, keys, itertools.chain([first], tables))
    return Opened(places, parts, header)


# ---- parts ----


def _row_parts(names, rows, path, layout, bad):
    places = [names.index(name) for name in layout.columns]
    while part := list(itertools.islice(rows, _PART)):
        yield checked_rows(path, part, places, layout, bad)


def _table_parts(keys, tables, path, layout, bad):
    from fastsim.training.tables import checked_columns  # needs Arrow

    names, count = list(keys.values()), 1
    for table in tables:
        columns = checked_columns(table, keys, layout)
        if columns is not None:
            yield columns
        else:
            rows = numbered(table.select(names).to_pylist(), start=count)
            yield from _row_parts(list(keys), _select_keys(path, names, rows), path, layout, bad)
        count += len(table)


def _delimited_parts(places, tables, rows, path, layout, bad):
    """The columns of Arrow tables up to the first fault, then those of rows, which report it."""
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
        repeated = min(done, len(columns[0]))  # rows that a table has yielded already
        done -= repeated
        yield [column[repeated:] for column in columns]
