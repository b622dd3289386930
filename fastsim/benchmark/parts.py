"""What is there of a run that was broken off: a file for each process that came to its end."""

import json
from pathlib import Path

import click

from fastsim.benchmark import results
from fastsim.files import OutputError


class Parts:
    """The files of a run, in the folder FILE.parts beside its result file; None keeps nothing.

    ValueError where there are parts of a run that is not to be resumed, or of another one: other
    settings, device, versions or commit.
    """

    def __init__(self, out, *, resume=False):
        self.folder = None if out is None else Path(f"{out}.parts")
        if resume or not self.begun:
            return
        raise ValueError(
            f"out: {str(self.folder)!r} holds parts of a run that was broken off; go on with"
            " --resume, or remove it"
        )

    @property
    def begun(self):
        """Whether there are parts already."""
        return self.folder is not None and any(self._files())

    def kept(self, name, about, measure):
        """The rows of a part: read if they are there, else measured and written.

        Where they cannot be written, that is said, and they are not lost.
        """
        if self.folder is None:
            return measure()
        for path in self._files():  # all: those of another run are not to be removed
            self._check(path, results.read(path)[0], about)
        path = self.folder / f"{name}.jsonl"
        if path.is_file():
            return results.read(path)[1]
        rows = measure()
        try:
            results.write(path, about, rows)
        except OutputError as error:
            click.echo(f"not kept, should the run be broken off: {error}", err=True)
        return rows

    def remove(self):
        """Remove the files, once the whole is written."""
        if self.folder is not None and self.folder.is_dir():
            for path in (*self._files(), *self.folder.glob(".*.part")):  # cut off while written
                path.unlink()
            self.folder.rmdir()

    def _files(self):
        return self.folder.glob("*.jsonl")

    @staticmethod
    def _check(path, earlier, about):
        # As JSON has them: lists for tuples.
        now = json.loads(json.dumps(about))
        for name in ("device", "settings", "versions", "commit"):
            if earlier.get(name) != now[name]:
                raise ValueError(
                    f"resume: {path} has other {name} than this run: {earlier.get(name)}, here"
                    f" {now[name]}"
                )
