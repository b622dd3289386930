"""The rows of a data set while they are read, and the `datasets.Dataset` that they become.

In memory while they are few, else in a file of Arrow that is mapped into memory and vanishes with
the process.
"""

import contextlib
import os
import tempfile
from pathlib import Path

_IN_MEMORY = 50_000  # rows; more are mapped from a file


class Store:
    """Columns that grow by parts: in memory, or from `_IN_MEMORY` rows on in a mapped file."""

    def __init__(self, say):
        self.rows, self._parts, self._writer, self._say = 0, [], None, say
        self._named, self._path = 0, None

    def begin(self, layout):
        """Name the columns, those of a `Format`, before their first rows."""
        import pyarrow

        kinds = {"score": pyarrow.float64()}
        fields = [(name, kinds.get(name, pyarrow.string())) for name in layout.columns]
        self.schema = pyarrow.schema(fields)

    def add(self, columns):
        import pyarrow

        arrays = [
            column.cast(field.type)
            if isinstance(column, pyarrow.Array)
            else pyarrow.array(column, type=field.type)
            for column, field in zip(columns, self.schema, strict=True)
        ]
        part = pyarrow.record_batch(arrays, schema=self.schema)
        self.rows += len(part)
        if self._writer is None:
            self._parts.append(part)
            if self.rows > _IN_MEMORY:
                self._spill()
        else:
            self._writer.write_batch(part)
        if self.rows - self._named >= 500_000:
            self._named = self.rows
            self._say(f"read {self.rows:,} rows")

    def _spill(self):
        import datasets
        import pyarrow

        folder = Path(datasets.config.HF_DATASETS_CACHE)
        folder.mkdir(parents=True, exist_ok=True)
        handle, self._path = tempfile.mkstemp(prefix="fastsim-", suffix=".arrow", dir=folder)
        self._file = os.fdopen(handle, "wb")
        self._writer = pyarrow.ipc.new_stream(self._file, self.schema)
        for part in self._parts:
            self._writer.write_batch(part)
        self._parts = []

    def dataset(self):
        import datasets
        import pyarrow

        if self._writer is None:
            return datasets.Dataset(pyarrow.Table.from_batches(self._parts, self.schema))
        self._writer.close()
        self._file.close()
        found = datasets.Dataset.from_file(self._path)
        if os.name == "posix":
            os.unlink(self._path)  # the map keeps it until the process ends
        return found

    def discard(self):
        """Remove the file of rows whose reading came to nothing."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk, which the reading has told of
                self._file.close()
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)
