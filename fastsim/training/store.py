"""Collects rows while they are read, and makes a `datasets.Dataset` of them.

Few rows are kept in memory. Many rows go to an Arrow file that is mapped into memory, and removed
when the process ends.
"""

import contextlib
import os
import shutil
from pathlib import Path

from fastsim.files import full_disk_named
from fastsim.locks import begun_folder, remove_left

_IN_MEMORY = 50_000  # rows; more are mapped from a file
_FOLDER = "fastsim-rows-"  # prefix of the folder of that file, in the cache of `datasets`


class Store:
    """Columns that grow part by part: in memory, or beyond `_IN_MEMORY` rows in a mapped file."""

    def __init__(self, say):
        self.rows, self._parts, self._writer, self._say = 0, [], None, say
        self._reported, self._folder, self._handle = 0, None, None

    def begin(self, layout):
        """Set the columns, those of a `Format`, before the first rows are added."""
        import pyarrow

        kinds = {"score": pyarrow.float64()}
        fields = [(name, kinds.get(name, pyarrow.string())) for name in layout.columns]
        self.schema = pyarrow.schema(fields)

    def add(self, columns):
        """Add the columns of some rows."""
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
            self._write([part])
        if self.rows - self._reported >= 500_000:
            self._reported = self.rows
            self._say(f"read {self.rows:,} rows")

    def _spill(self):
        import datasets
        import pyarrow

        cache = Path(datasets.config.HF_DATASETS_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        remove_left(cache, _FOLDER)
        self._folder, self._handle = begun_folder(cache, _FOLDER)
        self._file = open(self._folder / "rows.arrow", "wb")  # noqa: SIM115 - closed at the end
        self._writer = pyarrow.ipc.new_stream(self._file, self.schema)
        self._write(self._parts)
        self._parts = []

    def _write(self, parts):
        with full_disk_named(self._file.name):
            for part in parts:
                self._writer.write_batch(part)

    def dataset(self):
        """All rows as a `datasets.Dataset`."""
        import datasets
        import pyarrow

        if self._writer is None:
            return datasets.Dataset(pyarrow.Table.from_batches(self._parts, self.schema))
        with full_disk_named(self._file.name):
            self._writer.close()
            self._file.close()
        dataset = datasets.Dataset.from_file(self._file.name)
        if os.name == "posix":  # the mapped file stays readable after its removal
            self._remove()
        return dataset

    def discard(self):
        """Remove the file after reading has failed."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # such as for a full disk, already raised before
                self._file.close()
        self._remove()

    def _remove(self):
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
        self._folder = self._handle = None
