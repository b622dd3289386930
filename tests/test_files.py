"""Files that are there whole or not at all: their rights, and which errors are a full disk."""

import errno
import os
from pathlib import Path

import pytest
import torch

from fastsim.files import (
    OutputError,
    check_new_file,
    full_disk_named,
    is_full_disk,
    unused_old_name,
    whole_file,
    write_whole,
)


def test_a_new_file_has_the_rights_of_any(tmp_path):
    """Whatever a library gives the one that it makes."""
    (tmp_path / "any").touch()
    with whole_file(tmp_path / "file") as part:
        part.chmod(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_file_keeps_its_rights_and_any_name(tmp_path):
    """Also while it is written, and under a name as long as names can be."""
    file = tmp_path / ("n" * 255)
    file.touch(mode=0o600)
    with whole_file(file) as part:
        assert part.stat().st_mode & 0o777 == 0o600
        part.unlink()
        part.write_text("new")  # as some libraries make it
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_known_by_its_number_and_by_what_came_before():
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert is_full_disk(OSError(number, "of some system"))
    assert not is_full_disk(OSError(errno.EACCES, "of some system"))
    for cause in (True, False):
        full, later = OSError(errno.EDQUOT, "of some system"), ValueError("no header")
        later.__cause__, later.__context__ = (full, None) if cause else (None, full)
        assert is_full_disk(later)


def test_the_file_that_found_no_room_is_named(tmp_path):
    """The error's own, else the newest of the folder, else the folder itself."""

    def named(*more):
        with pytest.raises(OutputError) as caught, full_disk_named(tmp_path, "old model"):
            raise OSError(errno.ENOSPC, "full", *more)
        assert caught.value.strerror.endswith("; what was in 'old model' is as it was")
        return caught.value.strerror.split("'")[1]

    assert named() == str(tmp_path)
    for when, name in ((2, "newest"), (1, "before")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    assert named() == str(tmp_path / "newest")
    assert named("given") == "given"


def test_an_error_that_names_its_file_is_passed_on(tmp_path):
    inner = OutputError(errno.ENOSPC, "disk full: cannot write 'inner'")
    with pytest.raises(OutputError) as caught, full_disk_named(tmp_path):
        raise inner
    assert caught.value is inner


def test_a_link_to_nothing_takes_a_name_too(tmp_path):
    (tmp_path / "file.old").symlink_to(tmp_path / "nothing")
    assert unused_old_name(tmp_path / "file") == tmp_path / "file.old2"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    there, fsync = [], os.fsync

    def noted(descriptor):
        there.append((tmp_path / "file").exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_whole(tmp_path / "file", "one")
    assert there == [False]


def test_a_place_is_looked_at_before_the_work(tmp_path):
    check_new_file("output", tmp_path / "file")
    assert not any(tmp_path.iterdir())
    with pytest.raises(OutputError, match=r"^output: cannot write .*no.such"):
        check_new_file("output", tmp_path / "no/such")


def test_a_full_disk_is_known_by_what_torch_says(tmp_path):
    if not (path := Path("/dev/full")).exists():
        pytest.skip("wants /dev/full")
    with pytest.raises(OutputError, match="disk full: cannot write"), full_disk_named(tmp_path):
        torch.save(torch.zeros(1_000_000), path)
    part = "[enforce fail at inline_container.cc:672] . unexpected pos 5248 vs 5140"
    with pytest.raises(OutputError, match="disk full"), full_disk_named(tmp_path / "model"):
        raise RuntimeError(part)
    with pytest.raises(RuntimeError, match="another"), full_disk_named(tmp_path):
        raise RuntimeError("another")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    (tmp_path / "file.part").write_text("mine")
    link.symlink_to(file)
    write_whole(link, "one")
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == (tmp_path / "file.part").stat().st_mode & 0o777
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "one"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "file.part"}
    with pytest.raises(OutputError, match="cannot write"):
        write_whole(tmp_path / "no/such/folder", "one")
    with pytest.raises(OutputError, match="is not a file"):
        write_whole(tmp_path, "one")
