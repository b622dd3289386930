"""Reads CSV and TSV files with Arrow in blocks of rows: ten times as fast as row by row.

A block is read here only if Arrow is certain to read it like `fastsim.training.rows`. The rest of
the file is left to that row reader, which knows line numbers and reports faults.
"""

import numpy as np

from fastsim.training.rows import UNPACKING, dialect, open_bytes

_BLOCK = 8 << 20  # bytes
_LONGEST = 8 * _BLOCK  # bytes of a row; a longer one is left to the row reader
_BOM = b"\xef\xbb\xbf"
_QUOTE, _LINE, _RETURN = b'"\n\r'


class _NotPlain(Exception):  # noqa: N818 - not an error: the row reader continues
    """A block that the row reader may read differently."""


def delimited_tables(path, kind, delimiter, width, places, *, skip=0):
    """Arrow tables of the rows of a file, except the first `skip` rows.

    width: the number of fields of a row. places: the fields to read, as columns of text that are
    named by their place ("0" for the first). The last item is None if the rest of the file is not
    plain: if it has bytes that are not UTF-8, rows of another width, quotes within a field,
    carriage returns without a line feed, or a row of many megabytes.
    """
    mark = dialect(kind, delimiter)["delimiter"]
    quotes = kind != "tsv"
    try:
        if not mark.isascii():
            raise _NotPlain
        for block in _blocks(path, ord(mark), quotes):
            if block.strip(b"\r\n"):
                table = _table(block, mark, quotes, width, places).slice(skip)
                skip = 0
                if len(table):
                    yield table
    except (_NotPlain, UnicodeDecodeError, *UNPACKING):
        yield None


def _blocks(path, mark, quotes):
    """The bytes of a file, in blocks that end at the end of a row."""
    with open_bytes(path) as handle:
        rest = handle.read(len(_BOM)).removeprefix(_BOM)
        while True:
            chunk = handle.read(_BLOCK)
            block = rest + chunk
            end = _end_of_rows(block, mark, quotes, last=not chunk)
            if end:
                yield block[:end]
            if not chunk:
                return
            rest = block[end:]
            if len(rest) > _LONGEST:
                raise _NotPlain


def _end_of_rows(block, mark, quotes, last):
    """Where the last complete row of a block ends; a quoted field may contain line feeds.

    Raises `_NotPlain` unless every quote opens a field, closes it, or is doubled within it.
    """
    if not (quotes and b'"' in block):
        return len(block) if last else block.rfind(b"\n") + 1
    data = np.frombuffer(block, dtype=np.uint8)
    quotes_at = np.flatnonzero(data == _QUOTE)
    if last:
        end = len(block)
    else:
        lines = np.flatnonzero(data == _LINE)
        outside = lines[np.searchsorted(quotes_at, lines) % 2 == 0]
        end = int(outside[-1]) + 1 if len(outside) else 0
    quotes_at = quotes_at[quotes_at < end]
    if len(quotes_at) % 2:
        raise _NotPlain
    around = np.frombuffer(b"\n" + block[:end] + b"\n", dtype=np.uint8)
    # The bytes before opening quotes and after closing ones.
    neighbours = around[np.concatenate((quotes_at[::2], quotes_at[1::2] + 2))]
    if not np.isin(neighbours, [mark, _LINE, _RETURN, _QUOTE]).all():
        raise _NotPlain
    return end


def _table(block, mark, quotes, width, places):
    import pyarrow
    from pyarrow import csv

    returns = b"\r" in block and block.count(b"\r") != block.count(b"\r\n")
    if returns or block.startswith(_BOM):  # Arrow would remove a byte order mark
        raise _NotPlain
    block.decode()  # all columns, as the row reader checks the encoding of all
    names = [str(place) for place in places]
    try:
        return csv.read_csv(
            pyarrow.BufferReader(block),
            read_options=csv.ReadOptions(
                column_names=[str(place) for place in range(width)],
                block_size=len(block),
                use_threads=False,
            ),
            parse_options=csv.ParseOptions(
                delimiter=mark, quote_char='"' if quotes else False, newlines_in_values=quotes
            ),
            convert_options=csv.ConvertOptions(
                include_columns=names,
                column_types=dict.fromkeys(names, pyarrow.string()),
                check_utf8=False,
            ),
        )
    except pyarrow.ArrowInvalid as error:
        raise _NotPlain from error
