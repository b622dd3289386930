"""Selects the columns of a file to read, by its header and by the names that the user gives."""

import re

from fastsim.training.formats import describe, format_of, is_role
from fastsim.training.rows import DataError, other_delimiter


def parse_columns(columns):
    """The option `columns` as a list of (role, name in the file or None), or None."""
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
            raise DataError(f"columns: wanted each name once, got {role!r} twice")
    mapped = [name is not None for _, name in roles]
    if any(mapped) and not all(mapped):
        raise DataError(
            f"columns: wanted COLUMN=NAME for all columns or for none, got {', '.join(items)}"
        )
    try:
        format_of(named)
    except ValueError as error:
        raise DataError(str(error)) from error
    return roles


def check_header(header, used, path):
    """`DataError` if the header has one of the used names twice."""
    for name in used:
        if header.count(name) > 1:
            raise DataError(f"{path}: wanted each column once, got {name!r} twice")


def select(header, roles, path):
    """{role: position in the header} of the columns in use."""
    if roles is None:
        roles = [(name, None) for name in dict.fromkeys(header) if is_role(name)]
    used = [(role, name or role) for role, name in roles if role != "_"]
    check_header(header, [name for _, name in used], path)
    missing = [name for _, name in used if name not in header]
    if missing:
        raise DataError(
            f"{path}: wanted the columns {', '.join(missing)} too, got {', '.join(header)}"
            f"{other_delimiter(header)}"
        )
    return {role: header.index(name) for role, name in used}


def header_fault(error, header):
    """The message of an error about the columns, with the header and a hint how to map it."""
    return (
        f"{error}; the header is ({', '.join(header)}); --columns COLUMN=NAME,... maps it"
        f"{other_delimiter(header)}"
    )


def check_no_header(names, roles, second, path):
    """`DataError` if the first line seems to be a header although it lacks some of the roles.

    It seems to be one if it names a role, or if it looks like one beside the next row, `second`.
    """
    used = [role for role, _ in roles if role != "_"]
    if any(role in names for role in used):
        missing = [role for role in used if role not in names]
        raise DataError(
            f"{path}, line 1: wanted the columns {', '.join(missing)} too, got {', '.join(names)}."
            " Map them with --columns COLUMN=NAME,..., or use --no-header"
        )
    if looks_like_a_header(names, second):
        pairs = zip((role for role, _ in roles), names, strict=False)
        shown = ",".join(f"{role}={name}" for role, name in pairs if role != "_")
        raise DataError(
            f"{path}, line 1: this looks like a header: {', '.join(names)}. Map it with"
            f" --columns {shown}, or use --no-header"
        )


def looks_like_a_header(first, second):
    """Whether the fields are short distinct names, unlike those of the next row."""
    name = re.compile(r"[A-Za-z_][\w .-]{0,29}")
    named = all(name.fullmatch(field) and len(field.split()) <= 2 for field in first)
    if not named or len(set(first)) < len(first) or not isinstance(second, list):
        return False
    return any(len(field.split()) > 3 for field in second)
