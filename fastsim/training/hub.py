"""Data sets on the hub, by name: hub:NAME, hub:NAME:SPLIT, hub:NAME:CONFIG:SPLIT.

NAME is what `datasets.load_dataset` takes: owner/name, or a folder in its layout. The default of
SPLIT is "train".
"""

import hashlib
import itertools

from fastsim.training.rows import DataError, numbered

PREFIX = "hub:"
_PART = 10_000  # rows read at a time


def is_hub(name):
    """Whether the name of data names a data set on the hub."""
    return str(name).startswith(PREFIX)


def load(name):
    """The `datasets.Dataset` of a name; `DataError` if it cannot be loaded."""
    import datasets

    place, *parts = str(name).removeprefix(PREFIX).split(":")
    if not place or len(parts) > 2 or not all(parts):
        raise DataError(f"{name}: wanted hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    config, split = ([None, "train"] if not parts else [None, *parts])[-2:]
    try:
        return datasets.load_dataset(place, config, split=split)
    except Exception as error:  # of many types, from a wrong name to no network
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"{name}: the data set could not be loaded: {type(error).__name__}: {reason}"
        ) from error


def tables(name):
    """The rows as Arrow tables of up to 10,000, as `datasets` holds them."""
    yield from load(name).with_format("arrow").iter(_PART)


def rows(name):
    """(where, {column: value}) of each row."""
    parts = (table.to_pylist() for table in tables(name))
    yield from numbered(itertools.chain.from_iterable(parts))


def fingerprint(name):
    """SHA-256 of the rows."""
    import pyarrow

    digest = hashlib.sha256()
    for table in tables(name):
        serialized = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(serialized, table.schema) as stream:
            # Without metadata and in one chunk, so that equal rows have equal bytes.
            stream.write_table(table.combine_chunks())
        digest.update(serialized.getvalue())
    return digest.hexdigest()
