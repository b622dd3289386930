"""The parts of an interrupted run: one file for each process that finished."""

import json
from pathlib import Path

import click

from fastsim.benchmark import results
from fastsim.files import OutputError


class Parts:
    """The files of a run, in the folder FILE.parts beside its result file FILE; None keeps nothing.

    ValueError if there are parts of a run that is not to be resumed, or of another run: one with
    other settings, or another device, versions or commit.
    """

    def __init__(self, out, *, resume=False):
        self.folder = None if out is None else Path(f"{out}.parts")
        if resume or not self.started:
            return
        raise ValueError(
            f"out: {str(self.folder)!r} holds parts of an interrupted run; continue it with"
            " --resume, or remove the folder"
        )

    @property
    def started(self):
        """Whether some parts exist already."""
        return self.folder is not None and any(self._files())

    def load_or_measure(self, name, about, measure):
        """The rows of a part: read if its file exists, else measured and written.

        If they cannot be written, a message says so, and the rows are returned all the same.
        """
        if self.folder is None:
            return measure()
        for path in self._files():  # every file, so that none of another run is removed later
            self._check(path, results.read(path)[0], about)
        path = self.folder / f"{name}.jsonl"
        if path.is_file():
            return results.read(path)[1]
        rows = measure()
        try:
            results.write(path, about, rows)
        except OutputError as error:
            click.echo(f"not kept, should the run be interrupted: {error}", err=True)
        return rows

    def remove(self):
        """Remove the files, once the whole run is written."""
        if self.folder is not None and self.folder.is_dir():
            interrupted_writes = self.folder.glob(".*.part")
            for path in (*self._files(), *interrupted_writes):
                path.unlink()
            self.folder.rmdir()

    def _files(self):
        return self.folder.glob("*.jsonl")

    @staticmethod
    def _check(path, earlier, about):
        present = json.loads(json.dumps(about))  # with lists for tuples, as read from a file
        for name in ("device", "settings", "versions", "commit"):
            if earlier.get(name) != present[name]:
                raise ValueError(
                    f"resume: {path} has other {name} than this run: {earlier.get(name)}, here"
                    f" {present[name]}"
                )
