"""CSV and TSV files read by Arrow in blocks of whole rows: ten times as fast as row by row.

Only what is certain to be read as `fastsim.training.rows` reads it is read here. The rest is left
to the row reader, which knows line numbers and says what is wrong.
"""

import numpy as np

from fastsim.training.rows import UNPACKING, dialect, open_bytes

_BLOCK = 8 << 20  # bytes
_LONGEST = 8 * _BLOCK  # of a row; a longer one is left to the row reader
_BOM = b"\xef\xbb\xbf"
_QUOTE, _LINE, _RETURN = b'"\n\r'


class _NotPlain(Exception):  # noqa: N818 - no error: the row reader goes on
    """A block that the row reader may read otherwise."""


def delimited_tables(path, kind, delimiter, width, places, *, skip=0):
    """Arrow tables of the rows of a file, all but the first `skip`.

    width: how many fields a row has; places: those wanted, columns of text named by their place,
    from "0" on. The last item is None where the rest of the file is not plain: not UTF-8, rows
    of another width, quotes within a field, returns without a line feed, a row of many megabytes.
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
    """The bytes of a file in blocks that end with a row."""
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
    """Where the last whole row of a block ends, quotes taken into account.

    Quotes are plain where they open a field, close it, or stand doubled within it.
    """
    if not (quotes and b'"' in block):
        return len(block) if last else block.rfind(b"\n") + 1
    given = np.frombuffer(block, dtype=np.uint8)
    quoted = np.flatnonzero(given == _QUOTE)
    if last:
        end = len(block)
    else:
        lines = np.flatnonzero(given == _LINE)
        outside = lines[np.searchsorted(quoted, lines) % 2 == 0]
        end = int(outside[-1]) + 1 if len(outside) else 0
    quoted = quoted[quoted < end]
    if len(quoted) % 2:
        raise _NotPlain
    around = np.frombuffer(b"\n" + block[:end] + b"\n", dtype=np.uint8)
    neighbours = around[np.concatenate((quoted[::2], quoted[1::2] + 2))]  # before, and after
    if not np.isin(neighbours, [mark, _LINE, _RETURN, _QUOTE]).all():
        raise _NotPlain
    return end


def _table(block, mark, quotes, width, places):
    import pyarrow
    from pyarrow import csv

    returns = b"\r" in block and block.count(b"\r") != block.count(b"\r\n")
    if returns or block.startswith(_BOM):  # which Arrow would take away
        raise _NotPlain
    block.decode()  # all of it: the row reader would find a fault in any column
    wanted = [str(place) for place in places]
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
                include_columns=wanted,
                column_types=dict.fromkeys(wanted, pyarrow.string()),
                check_utf8=False,
            ),
        )
    except pyarrow.ArrowInvalid as error:
        raise _NotPlain from error
