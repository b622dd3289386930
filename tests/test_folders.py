"""Output folders: the user's files stay, links and mounts work, a full disk changes nothing."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from fastsim.folders import OutputError, check_writable, cut_off, finish_exchanges, replaced_folder
from fastsim.manifest import MANIFEST

NAMES = ("pictures/holiday.jpg", "1_raw_data/a.csv", "2_todo.txt", "tokenizer_corpus/a",
         "vocab.mine", "model-00001-of-00002.safetensors", "checkpoints/notes")  # fmt: skip


def write(path, files):
    with replaced_folder(path) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def content(path):
    return {
        str(file.relative_to(path)): file.read_text()
        for file in path.rglob("*")
        if file.is_file() and file.name != MANIFEST
    }


def test_only_files_of_a_manifest_are_removed(tmp_path):
    out = tmp_path / "out"
    mine = dict.fromkeys(NAMES, "mine")
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    (out / "config.json").write_text("mine")
    write(out, {"config.json": "one", "2_Dense/model": "one", "pictures/curves.png": "one"})
    mine["config.json.old"] = "mine"
    one = {"config.json": "one", "2_Dense/model": "one", "pictures/curves.png": "one"}
    assert content(out) == mine | one
    write(out, {"config.json": "two", "2_Dense": "a file now"})
    assert content(out) == mine | {"config.json": "two", "2_Dense": "a file now"}


def test_what_was_put_aside_stays(tmp_path):
    mine = {"a": "mine", "a.old": "mine too"}
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    write(tmp_path, {"a": "one"})
    assert content(tmp_path) == {"a": "one", "a.old": "mine too", "a.old2": "mine"}


def test_what_was_edited_is_put_aside(tmp_path, capsys):
    """Whether the new model has such a file or not; so is what took the place of a file."""
    write(tmp_path, dict.fromkeys(("README.md", "same", "gone", "folder", "touched"), "one"))
    (tmp_path / "README.md").write_text("my words on it")
    (tmp_path / "gone").write_text("two")  # as long as it was
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes").write_text("mine")
    os.utime(tmp_path / "touched", ns=(1, 1))  # as a copy of it has another time
    said = []
    with replaced_folder(tmp_path, said.append) as folder:
        (folder / "README.md").write_text("new")
    mine = {"README.md.old": "my words on it", "gone.old": "two", "folder.old/notes": "mine"}
    assert content(tmp_path) == mine | {"README.md": "new"}
    assert len(said) == 3
    assert f"{str(tmp_path / 'README.md')!r} is not as fastsim wrote it; it is kept as" in said[0]
    write(tmp_path, {"README.md": "newer"})
    assert content(tmp_path) == mine | {"README.md": "newer"}
    assert not capsys.readouterr().err


def test_what_would_be_loaded_with_the_new_model_is_put_aside(tmp_path):
    """Such as an adapter, which transformers puts on whatever weights are beside it."""
    read = ("adapter_config.json", "modules.json", "sentence_bert_config.json", "model.safetensors")
    for name in (*read, "notes.json", "weights.safetensors"):
        (tmp_path / name).write_text("mine")
    said = []
    with replaced_folder(tmp_path, said.append) as folder:
        for name in ("config.json", "modules.json"):
            (folder / name).write_text("new")
    mine = dict.fromkeys((*(f"{name}.old" for name in read), "notes.json", "weights.safetensors"))
    assert content(tmp_path) == dict.fromkeys(mine, "mine") | {
        "config.json": "new",
        "modules.json": "new",
    }
    assert len(said) == len(read)


def test_a_linked_folder_is_put_aside_and_nothing_changes_beyond_it(tmp_path):
    out, beyond = tmp_path / "out", tmp_path / "beyond"
    write(out, {"pictures/curves.png": "one", "weights": "one"})
    (out / "pictures").rename(beyond)
    (out / "pictures").symlink_to(beyond)
    write(out, {"weights": "two"})
    assert (out / "pictures").is_symlink()
    write(out, {"pictures/curves.png": "three", "weights": "three"})
    assert (out / "pictures.old").readlink() == beyond
    assert content(beyond) == {"curves.png": "one"}
    assert (out / "pictures/curves.png").read_text() == "three"


def test_a_manifest_of_names_alone_is_read(tmp_path):
    """As earlier versions wrote it: what was edited since is not known."""
    write(tmp_path, {"a": "one", "b": "one"})
    (tmp_path / MANIFEST).write_text(json.dumps({"files": ["a", "b"]}))
    write(tmp_path, {"a": "two"})
    assert content(tmp_path) == {"a": "two"}


def test_a_manifest_names_files_within(tmp_path):
    out, notes, empty = (tmp_path / name for name in ("out", "notes", "empty"))
    notes.write_text("mine")
    empty.mkdir()
    write(out, {"a": "one"})
    names = ["a", "../notes", str(notes), str(empty / "gone")]
    (out / MANIFEST).write_text(json.dumps({"files": names}))
    write(out, {"b": "two"})
    assert content(out) == {"b": "two"}
    assert notes.read_text() == "mine"
    assert empty.is_dir()


def test_files_are_as_readable_as_other_new_ones(tmp_path):
    """Some libraries write theirs for their user alone."""
    mask = os.umask(0o027)
    try:
        with replaced_folder(tmp_path) as folder:
            (folder / "weights").touch(mode=0o600)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o640


def test_an_error_in_the_exchange_changes_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, {"a": "one", "b/c": "one"})
    (out / "mine").write_text("mine")
    rename, calls = os.rename, []

    def breaks(source, target):
        calls.append(target)
        if len(calls) == 5:
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", breaks)
        with pytest.raises(OSError, match="Input/output"):
            write(out, {"a": "two", "b/c": "two", "mine": "two"})
    assert content(out) == {"a": "one", "b/c": "one", "mine": "mine"}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_an_error_leaves_an_empty_folder_of_the_user_and_none_of_ours(tmp_path):
    for name, stays in (("empty", True), ("new", False)):
        out = tmp_path / name
        if stays:
            out.mkdir()
        with pytest.raises(ValueError, match="mine"), replaced_folder(out):
            raise ValueError("mine")
        assert out.exists() == stays


def test_all_new_files_are_on_the_disk_before_the_first_is_moved(tmp_path, monkeypatch):
    """A file that is renamed but not on the disk may be empty after a loss of power."""
    done = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        done.append(os.fstat(handle).st_ino)
        fsync(handle)

    def noted_rename(source, target):
        done.append("moved")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    write(tmp_path, {"config.json": "{}", "1_Pooling/config.json": "{}", "weights": "one"})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4  # and the manifest
    assert {path.stat().st_ino for path in files} <= set(done[: done.index("moved")])


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="wants a list of open files")
def test_no_file_stays_open(tmp_path):
    """The mark that a folder is being written is held by an open file."""
    before = {*os.listdir("/dev/fd")}
    write(tmp_path, {"weights": "one"})
    with pytest.raises(ValueError, match="mine"), replaced_folder(tmp_path):
        raise ValueError("mine")
    assert before.issuperset(
        os.listdir("/dev/fd")
    )  # files of earlier tests may be closed meanwhile


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.parametrize("moves", range(10))  # 4 files out, 5 in, one put aside
def test_a_crash_in_the_exchange_is_finished_by_the_next(moves, tmp_path):
    out = tmp_path / "out"
    old = {"modules.json": "old", "weights": "old", "1_Pooling/config.json": "old"}
    write(out, old)
    (out / "notes").write_text("mine")
    new = {"modules.json": "new", "weights": "new", "2_Dense/model": "new", "notes": "new"}
    child = os.fork()
    if child == 0:
        rename, left = os.rename, iter([True] * moves)
        os.rename = lambda *names: rename(*names) if next(left, False) else os._exit(9)
        write(out, new)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    there = content(out)
    assert "mine" in there.values()
    if "modules.json" in there:  # what passes for a model is whole
        wanted = new if there["modules.json"] == "new" else old
        assert wanted.items() <= there.items()
    check_writable(out)
    assert content(out) == there  # to ask changes nothing
    finish_exchanges(out)
    assert content(out) == new | {"notes.old": "mine"}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
def test_one_process_exchanges_at_a_time(tmp_path, monkeypatch):
    """Another that begins in the middle waits; it takes the exchange for no crash."""
    import fcntl

    out, rename, lock, children = tmp_path / "out", os.rename, fcntl.flock, []
    waited, (told, tells) = [], os.pipe()
    one, two, three = ({"modules.json": n, "weights": n, f"{n}/a": n} for n in ("1", "2", "3"))
    write(out, one)

    def begins_another(source, target):
        rename(source, target)
        if not children and ".fastsim-old-" in str(target):
            children.append(os.fork())
            if children[0] == 0:
                monkeypatch.undo()
                fcntl.flock = tell_and_wait
                write(out, three)
                os._exit(0)
            os.close(tells)
            waited.append(os.read(told, 1))  # nothing where it has come to its end

    def tell_and_wait(handle, kind):
        """A lock, which says so before it waits."""
        try:
            lock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not kind & fcntl.LOCK_NB:
                os.write(tells, b"1")
            lock(handle, kind)

    monkeypatch.setattr(os, "rename", begins_another)
    write(out, two)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert waited == [b"1"]
    assert content(out) == three
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    """It may be as large as a model. What is still being written stays."""
    child = os.fork()
    if child == 0:
        with replaced_folder(tmp_path) as folder:
            (folder / "weights").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 1
    (tmp_path / ".fastsim-new-mine").write_text("mine")  # no folder of ours
    with replaced_folder(tmp_path) as folder:
        (folder / "weights").write_text("two")
        write(tmp_path, {"weights": "one"})
    assert content(tmp_path) == {"weights": "two", ".fastsim-new-mine": "mine"}
    assert {path.name for path in tmp_path.iterdir()} == {"weights", MANIFEST, ".fastsim-new-mine"}


def test_a_model_whose_old_files_a_crash_left_is_whole(tmp_path):
    """Whatever its last file is called: a cross-encoder has no modules.json."""
    write(tmp_path, {"config.json": "{}"})
    (tmp_path / ".fastsim-old-x").mkdir()
    assert not cut_off(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert cut_off(tmp_path)


def test_a_model_cut_off_in_the_exchange_is_named(tmp_path):
    pytest.importorskip("transformers")
    from fastsim.encoders.model_files import ModelError, model_folder

    (tmp_path / ".fastsim-old-x").mkdir()
    with pytest.raises(ModelError, match=r"model: writing to .* was interrupted while files"):
        model_folder(tmp_path)
    (tmp_path / ".fastsim-old-x/weights").write_text("mine")
    with pytest.raises(OutputError, match="nothing says where they belong"):
        check_writable(tmp_path)
    assert (tmp_path / ".fastsim-old-x/weights").read_text() == "mine"


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write(tmp_path / "out", {"a": "one"})
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "real") == {"a": "one"}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), replaced_folder(tmp_path / "file"):
        pass
    with pytest.raises(OutputError, match="is a file"):
        check_writable(tmp_path / "file")
    check_writable(tmp_path / "a/b")
    assert not (tmp_path / "a").exists()


def can_mount():
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


MOUNTED = """
import json, os, sys
from pathlib import Path
from fastsim.folders import OutputError, check_writable, replaced_folder
from fastsim.training.checkpoints import checkpoint_folder
root = Path(sys.argv[1])
told = {}
for name, size in (("volume", 10), ("link", 10), ("full", 10), ("full", 2_000_000)):
    check_writable(root / name)
    try:
        with replaced_folder(root / name) as folder:
            (folder / "weights").write_bytes(bytes([size % 251]) * size)
        told[name] = checkpoint_folder(root / name).name
    except OutputError as error:
        told["error"] = error.strerror
    (root / "volume/notes").write_text("mine")
try:
    check_writable(root / "locked/out")
except OutputError as error:
    told["locked"] = str(error)
check_writable(root / "locked/writable")
told["writable"] = checkpoint_folder(root / "locked/writable").name
told["kept"] = (root / "full/weights").stat().st_size
told["names"] = sorted(p.name for p in (root / "full").iterdir())
told["volume"] = sorted(p.name for p in (root / "volume").iterdir())
told["is link"] = (root / "link").is_symlink()
print(json.dumps(told))
"""


@pytest.mark.skipif(not can_mount(), reason="wants the right to mount file systems")
def test_mount_points_links_to_them_a_full_disk_and_a_read_only_parent(tmp_path):
    for name in ("volume", "other", "full", "locked"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other/inside")
    script = tmp_path / "script.py"
    script.write_text(MOUNTED)
    mounts = (
        f"cd {tmp_path} && mount -t tmpfs none volume && mount -t tmpfs none other"
        " && mount -t tmpfs -o size=1m none full && mount -t tmpfs none locked"
        " && mkdir locked/writable other/inside && mount -t tmpfs none locked/writable"
        f" && mount -o remount,ro locked && {sys.executable} {script} {tmp_path}"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", mounts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["volume"] == [MANIFEST, "notes", "weights"]
    assert told["link"] == "inside-checkpoints"
    assert told["is link"]
    assert told["writable"] == "checkpoints"
    assert told["error"].startswith("disk full: cannot write")
    assert told["kept"] == 10
    assert told["names"] == [MANIFEST, "weights"]
    assert "locked/out" in told["locked"]
    assert "Read-only file system" in told["locked"]
