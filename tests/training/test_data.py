"""Reading data: every format gives the same rows, by their columns."""

import errno
import gc
import json
import os
from collections import Counter

import pytest

pytest.importorskip("datasets")  # and Arrow, which it wants
import pyarrow
from pyarrow import parquet

from fastsim.training.data import DataError, read_corpus, read_data
from fastsim.training.formats import format_of
from tests import models

ROWS = [("A plane flies.", "An air plane, in flight", 4.5), ('He said "no".', "NA", 0.0)]


def written(path, kind):
    """ROWS as a file of this kind."""
    import pandas

    frame = pandas.DataFrame(ROWS, columns=["sentence1", "sentence2", "score"])
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "tsv":
        lines = ["\t".join(map(str, row)) for row in [tuple(frame.columns), *ROWS]]
        path.write_text("\n".join(lines) + "\n")
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_reads_the_same(kind, tmp_path):
    path = written(tmp_path / f"data.{kind}", kind)
    dataset, layout = read_data(path)
    assert layout == format_of(["sentence1", "sentence2", "score"])
    assert [tuple(row.values()) for row in dataset] == ROWS  # "NA" is a text here
    path.rename(tmp_path / "data.bin")
    again, _ = read_data(tmp_path / "data.bin", kind=kind)
    assert again.to_list() == dataset.to_list()


def test_columns_name_roles(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b,1\nc,d,0\n")
    dataset, _ = read_data(path, columns="sentence1,sentence2,score")  # no header
    assert dataset["score"][:] == [1.0, 0.0]
    dataset, layout = read_data(path, columns="anchor,positive,_")
    assert (layout.name, len(dataset)) == ("tuples", 2)
    path.write_text("id,x,y,gold\n7,a,b,1\n")
    dataset, _ = read_data(path, columns="sentence1=x,sentence2=y,score=gold")
    assert dataset.to_list() == [{"sentence1": "a", "sentence2": "b", "score": 1.0}]
    path.write_text("score,sentence2,sentence1\n1,b,a\n")
    dataset, _ = read_data(path, columns="sentence1,sentence2,score")  # a header, another order
    assert dataset[0]["sentence1"] == "a"


@pytest.mark.parametrize(
    ("columns", "name", "texts"),
    [
        (("sentence1", "sentence2", "score"), "scored pairs", 2),
        (("sentence1", "sentence2", "label"), "labelled pairs", 2),
        (("anchor", "positive"), "tuples", 2),
        (("anchor", "positive", "negative", "negative_2"), "tuples", 4),
        (("anchor", "positive", "negative1", "negative2"), "tuples", 4),
        (("text", "label", "more"), "labelled texts", 1),
        (("together", "text", "label"), "labelled texts", 1),
    ],
)
def test_columns_decide_the_format(columns, name, texts):
    layout = format_of(columns)
    assert (layout.name, len(layout.texts)) == (name, texts)


def test_a_column_says_what_comes_together(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("scene,a,b\n1,one,two\n1.0,three,four\n")
    dataset, layout = read_data(path, columns="together=scene,anchor=a,positive=b")
    assert layout.together == "together"
    assert dataset.to_list() == [
        {"anchor": "one", "positive": "two", "together": "1"},
        {"anchor": "three", "positive": "four", "together": "1.0"},
    ]
    with pytest.raises(DataError, match="together: needs tuples or labelled texts, got scor"):
        read_data(path, columns="together=scene,sentence1=a,sentence2=b,score=scene")
    path.write_text("text,label,together\none,1,\n")
    with pytest.raises(DataError, match="line 2: together: wanted a class, got ''"):
        read_data(path)


def test_read_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert read_corpus(tmp_path / "a.txt") == ["one", "two"]
    (tmp_path / "a.csv").write_text("id,text\n1,one\n")
    assert read_corpus(tmp_path / "a.csv") == ["one"]
    (tmp_path / "a.2024.txt").write_text("one\n")
    assert read_corpus(tmp_path / "a.2024.txt") == ["one"]
    for text, reason in (
        ("text\none, two\n", "line 2: wanted 1 fields, got 2"),
        ("id,text\n1\n", "line 2: wanted 2 fields, got 1"),
        ("text,text\n1,2\n", "wanted each column once, got 'text' twice"),
    ):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(DataError, match=reason):
            read_corpus(tmp_path / "b.csv")
    (tmp_path / "nul.txt").write_text("one\ntw\0o\n")
    with pytest.raises(DataError, match=r"nul\.txt, line 2: text: the text holds a NUL byte"):
        read_corpus(tmp_path / "nul.txt")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"title": "two"}\n')
    with pytest.raises(DataError, match="line 2: wanted a column text"):
        read_corpus(tmp_path / "a.jsonl")


def test_real_files_read(tmp_path):
    folder = models.real_data()
    dataset, layout = read_data(folder / "stsb/test.csv", columns="sentence1,sentence2,score")
    assert (layout.name, len(dataset)) == ("scored pairs", 1379)
    columns = "sentence1=sentence_A,sentence2=sentence_B,label=entailment_judgment"
    dataset, _ = read_data(folder / "sick/SICK_train.txt", columns=columns, kind="tsv")
    assert len(dataset) == 4500
    counts = Counter(dataset["label"])
    assert sorted(counts) == ["CONTRADICTION", "ENTAILMENT", "NEUTRAL"]
    (tmp_path / "x.jsonl").write_text(json.dumps(dataset[0]) + "\n")
    assert read_data(tmp_path / "x.jsonl")[0].to_list() == [dataset[0]]


def test_long_fields_gzip_json_and_several_files(tmp_path):
    import gzip

    long = "x" * 200_000
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(f"anchor,positive\n{long},b\n".encode()))
    assert read_data(path)[0]["anchor"][:] == [long]
    other = tmp_path / "data.json"
    other.write_text(json.dumps([{"anchor": "a", "positive": "b"}]))
    dataset, _ = read_data([path, other])
    assert dataset["positive"][:] == ["b", "b"]
    path.rename(tmp_path / "data.csv")
    with pytest.raises(DataError, match=r"seems to be compressed by gzip; give it .* in \.gz"):
        read_data(tmp_path / "data.csv")
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="not a complete gzip file"):
        read_data(path)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_column_may_be_anchor_and_positive(kind, tmp_path):
    """So are texts trained without labels: both vectors of a text, with different dropout."""
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    elif kind == "jsonl":
        path.write_text('{"text": "a"}\n{"text": "b"}\n')
    else:
        path.write_text("text\na\nb\n")
    dataset, _ = read_data(path, columns="anchor=text,positive=text")
    assert dataset.to_dict() == {"anchor": ["a", "b"], "positive": ["a", "b"]}


def test_columns_of_arrow_are_read_as_rows_are(tmp_path, monkeypatch):
    """Classes that are numbers, scores that are integers, other types of text: the same values."""
    from fastsim.training import tables

    given = [
        {"sentence1": ["a ", "b"], "sentence2": ["c", "d"], "score": [1, 0]},
        {"sentence1": ["a"], "sentence2": ["c"], "score": pyarrow.array([0.5], pyarrow.float32())},
        {"sentence1": ["a"], "sentence2": ["c"], "score": [2**60 + 1]},  # no float64
        {"text": ["a", "b"], "label": [3, 4]},
        {"text": ["a", "b"], "label": [" x", "y"]},
        {"text": ["a", "b"], "label": [1.0, 2.0]},
        {"text": pyarrow.array(["a"], pyarrow.large_string()), "label": ["z"]},
    ]
    for number, columns in enumerate(given):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        found = read_data(path)[0].to_dict()
        with monkeypatch.context() as patch:
            patch.setattr(tables, "checked_columns", lambda *_: None)
            assert read_data(path)[0].to_dict() == found


def test_a_class_may_be_written_in_several_ways(tmp_path):
    """As a number, a text, or true for 1: the same class."""
    path = tmp_path / "data.jsonl"
    given = [1, 1.0, "1", " 1", True, 0, 0.0, "0", False]
    rows = [{"text": "a", "label": label} for label in given]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset, _ = read_data(path)
    assert dataset["label"][:] == ["1"] * 5 + ["0"] * 4


def test_data_sets_of_the_hub_are_read_by_name(tmp_path):
    from fastsim.training import hub

    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: pairs\n  data_files:\n  - split: train\n    path: a.jsonl\n"
        "  - split: held\n    path: b.jsonl\n---\n"
    )
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(f'{{"question": "{name}?", "answer": "{name}!"}}\n')
    columns = "anchor=question,positive=answer"
    for name, text in (("", "a?"), (":held", "b?"), (":pairs:held", "b?")):
        dataset, layout = read_data(f"hub:{folder}{name}", columns=columns)
        assert layout.name == "tuples"
        assert dataset["anchor"][:] == [text]
    assert hub.fingerprint(f"hub:{folder}") != hub.fingerprint(f"hub:{folder}:held")
    both, _ = read_data([f"hub:{folder}", f"hub:{folder}:held"], columns=columns)
    assert both["positive"][:] == ["a!", "b!"]
    with pytest.raises(
        DataError, match=r"^hub:.*: the data set could not be loaded: ValueError: Unknown"
    ):
        read_data(f"hub:{folder}:no", columns=columns)
    with pytest.raises(DataError, match=r"row 1: wanted a column text, got question, answer"):
        read_corpus(f"hub:{folder}")
    with pytest.raises(DataError, match="hub:a::b: wanted hub:NAME, hub:NAME:SPLIT"):
        read_data("hub:a::b")


def test_equal_rows_of_the_hub_have_one_fingerprint(tmp_path, monkeypatch):
    """In one file or in two, whose rows are chunks of another length in a table."""
    import datasets

    from fastsim.training import hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [f'{{"anchor": "{row}?", "positive": "{row}!"}}\n' for row in range(2000)]
    prints, chunks = [], []
    for number, parts in enumerate(([rows], [rows[:700], rows[700:]], [rows[:-1]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for place, part in enumerate(parts):
            (folder / f"{place}.jsonl").write_text("".join(part))
        prints.append(hub.fingerprint(f"hub:{folder}"))
        chunks.append([table["anchor"].num_chunks for table in hub.tables(f"hub:{folder}")])
    assert chunks[0] != chunks[1]
    assert prints[0] == prints[1] != prints[2]


def many_rows(folder):
    path = folder / "data.tsv"
    path.write_text("anchor\tpositive\n" + "".join(f"a{i}\tb{i}\n" for i in range(50)))
    return path


def test_many_rows_are_mapped_from_a_file(tmp_path, monkeypatch):
    from fastsim.training import opened, store

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(opened, "_PART", 7)
    dataset, _ = read_data(many_rows(tmp_path))
    assert dataset.cache_files
    assert dataset.to_list() == [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(50)]


def test_every_half_million_rows_are_told_once(tmp_path, monkeypatch):
    import datasets

    from fastsim.training.store import Store

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    said = []
    store = Store(said.append)
    store.begin(format_of(["anchor", "positive"]))
    texts = pyarrow.array(["a"] * 125_000)
    for _ in range(9):
        store.add([texts, texts])
    store.discard()
    assert said == ["read 500,000 rows", "read 1,000,000 rows"]


@pytest.mark.parametrize("fault", ["a bad row", "Ctrl-C"])
def test_a_reading_that_fails_leaves_no_file(fault, tmp_path, monkeypatch):
    import datasets

    from fastsim.training import opened, store

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(opened, "_PART", 7)
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    path = tmp_path / "data.jsonl"
    rows = [f'{{"anchor": "a{i}", "positive": "b{i}"}}\n' for i in range(50)]
    path.write_text("".join(rows) + ('{"anchor": ""}\n' if fault == "a bad row" else ""))
    add = store.Store.add

    def interrupted(self, columns):
        add(self, columns)
        assert bool(list(cache.rglob("*.arrow"))) == (self.rows > 20)
        if fault == "Ctrl-C" and self.rows > 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(store.Store, "add", interrupted)
    with pytest.raises(DataError if fault == "a bad row" else KeyboardInterrupt):
        read_data(path)
    assert not list(cache.iterdir())


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="wants a list of open files")
@pytest.mark.parametrize("end", ["dataset", "discard"])
def test_rows_that_are_mapped_leave_no_file_open(end, tmp_path, monkeypatch):
    """The mark that they are in use is held by an open file, until they need no name."""
    import datasets

    from fastsim.training import store

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def read():
        rows = store.Store(print)
        rows.begin(format_of(["anchor", "positive"]))
        rows.add([["a"] * 50, ["b"] * 50])
        assert list(tmp_path.iterdir())
        getattr(rows, end)()
        assert not list(tmp_path.iterdir())

    read()  # what is loaded once may keep files of its own
    before = {*os.listdir("/dev/fd")}
    read()
    gc.collect()
    assert before.issuperset(os.listdir("/dev/fd"))


def test_what_a_killed_reading_left_is_removed_by_the_next(tmp_path, monkeypatch):
    import datasets

    from fastsim.training import store

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    left, theirs = tmp_path / "cache/fastsim-rows-x/rows.arrow", tmp_path / "cache/csv/rows.arrow"
    for file in (left, theirs):
        file.parent.mkdir(parents=True)
        file.touch()
    read_data(many_rows(tmp_path))
    assert [path for path in (left, theirs) if path.exists()] == [theirs]


def test_a_full_disk_of_the_cache_is_named(tmp_path, monkeypatch):
    import datasets
    import pyarrow

    from fastsim.files import OutputError
    from fastsim.training import store

    class Full:
        def write_batch(self, part):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(pyarrow.ipc, "new_stream", lambda *given: Full())
    with pytest.raises(OutputError, match=r"disk full: cannot write '.*/cache/.*/rows\.arrow'"):
        read_data(many_rows(tmp_path))
    assert not list((tmp_path / "cache").iterdir())
