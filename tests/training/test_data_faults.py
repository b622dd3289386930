"""Data with faults: each stops with file, line and reason, and what is not used is named."""

import errno
import gzip
import io
import json
import math
import os

import pytest

pytest.importorskip("datasets")  # and Arrow, which it wants
import pyarrow
from pyarrow import parquet

from fastsim.training import rows
from fastsim.training.data import DataError, read_corpus, read_data

FAULTS = {
    "short row": ("csv", "sentence1,sentence2,score\na,b,1\nc,d\n", "line 3: wanted 3 fields"),
    "long row": ("csv", "sentence1,sentence2,score\na,b,1,x\n", "line 2: wanted 3 fields, got 4"),
    "no number": ("csv", "sentence1,sentence2,score\na,b,x\n", "line 2: score: wanted a number"),
    "nan": ("csv", "sentence1,sentence2,score\na,b,nan\n", "line 2: score: wanted a number"),
    "empty": ("csv", "sentence1,sentence2,score\na,  ,1\n", "line 2: sentence2: the text is empty"),
    "after a break": (
        "csv",
        'sentence1,sentence2,score\n"a\nb",c,1\nd,,1\n',
        "line 4: sentence2: the text is empty",
    ),
    "open quote": ("csv", 'sentence1,sentence2,score\n"a,b,1\n', "line 2: unexpected end of data"),
    "strange header": ("csv", "x,y\na,b\n", "columns: wanted one of"),
    "twice": ("csv", "anchor,positive,anchor\na,b,c\n", "column once, got 'anchor' twice"),
    "no rows": ("csv", "anchor,positive\n", "wanted at least one row, got none"),
    "nothing": ("csv", "", "wanted at least one row, got none"),
    "no json": ("jsonl", '{"anchor": "a", "positive": "b"}\n{"anchor\n', "line 2: not JSON"),
    "no object": ("jsonl", '["a"]\n', "line 1: wanted a JSON object"),
    "missing": ("jsonl", '{"anchor": "a", "positive": "b"}\n{"anchor": "a"}\n', "line 2: no posi"),
    "null": ("jsonl", '{"anchor": "a", "positive": null}\n', "line 1: no positive"),
    "a number": ("jsonl", '{"anchor": "a", "positive": 3}\n', "line 1: positive: wanted a text"),
    "parquet, a number": (
        "parquet",
        {"anchor": ["a"], "positive": [3]},
        "row 1: positive: wanted",
    ),
    "parquet, null": (
        "parquet",
        {"anchor": ["a"] * 10_002, "positive": ["b"] * 10_001 + [None]},
        "row 10002: no positive",
    ),
    "parquet, empty": (
        "parquet",
        {"anchor": ["a", "\u2003"], "positive": ["b"] * 2},
        "row 2: anchor",
    ),
    "parquet, a NUL": (
        "parquet",
        {"anchor": ["a", "b\0"], "positive": ["b"] * 2},
        "row 2: anchor",
    ),
    "parquet, NaN": (
        "parquet",
        {"sentence1": ["a"], "sentence2": ["b"], "score": [math.nan]},
        "row 1: score: wanted a number",
    ),
    "a later column": (
        "jsonl",
        '{"anchor": "a", "positive": "b"}\n{"anchor": "a", "positive": "b", "negative": "c"}\n',
        "line 2: wanted the columns of the first row, got negative too",
    ),
    "half a pair": (
        "jsonl",
        '{"anchor": "a\\ud800", "positive": "b"}\n',
        "line 1: anchor: the text holds half of a surrogate pair",
    ),
    "too large": (
        "jsonl",
        f'{{"sentence1": "a", "sentence2": "b", "score": {"9" * 401}}}\n',
        "line 1: score: wanted a number",
    ),
    "json, a number": (
        "json",
        '[\n{"anchor": "a", "positive": "b"},\n\n{"anchor": "c", "positive": 3}]',
        "row 2: positive: wanted a text, got 3",
    ),
    "json, no object": (
        "json",
        '[\n{"anchor": "a", "positive": "b"},\n["c"]]',
        r"row 2: wanted a JSON object, got \['c'\]",
    ),
    "json, no list": (
        "json",
        '{"anchor": "a"}',
        "wanted a JSON list of objects, got {'anchor': 'a'}",
    ),
    "no parquet": ("parquet", "x" * 20, "not Parquet"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_with_its_line(fault, tmp_path):
    kind, text, reason = FAULTS[fault]
    path = tmp_path / f"data.{kind}"
    if isinstance(text, dict):
        parquet.write_table(pyarrow.table(text), path)
    else:
        path.write_text(text)
    with pytest.raises(DataError, match=reason) as caught:
        read_data(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_faults_of_file_and_columns(tmp_path):
    path = tmp_path / "data.csv"
    with pytest.raises(DataError, match="no such file"):
        read_data(path)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match=r"pipe.csv: wanted a regular file, .* got a pipe or"):
        read_data(tmp_path / "pipe.csv")
    path.write_text("s1,s2,gold\na,b,1\n")
    with pytest.raises(DataError, match=r"line 1: score: .*does the file have a header"):
        read_data(path, columns="sentence1,sentence2,score")
    with pytest.raises(DataError, match="wanted the columns other too, got s1, s2, gold"):
        read_data(path, columns="sentence1=s1,sentence2=other,score=gold")
    with pytest.raises(DataError, match="got 'sentense1'"):
        read_data(path, columns="sentense1,sentence2,score")
    with pytest.raises(DataError, match="for all columns or for none"):
        read_data(path, columns="sentence1=s1,sentence2,score")
    path.write_bytes(b"sentence1,sentence2,score\n\xff,b,1\n")
    with pytest.raises(DataError, match="wanted UTF-8"):
        read_data(path)
    path.rename(tmp_path / "data.doc")
    with pytest.raises(DataError, match="wanted a suffix"):
        read_data(tmp_path / "data.doc")


def test_a_guess_that_there_is_no_header_is_told(tmp_path):
    path, said = tmp_path / "data.csv", []
    path.write_text("q,a\nhi there,hello\n")
    read_data(path, columns="anchor,positive", say=said.append)
    assert said == [
        f"{path}: read as a file without a header; line 1 is a row: anchor 'q', positive 'a'"
    ]
    read_data(path, columns="anchor,positive", header=False, say=said.append)
    read_data(path, columns="anchor=q,positive=a", say=said.append)
    assert len(said) == 1
    path.write_text("q\na,b\n")
    with pytest.raises(DataError, match="line 1: wanted 2 fields, got 1"):
        read_data(path, columns="anchor,positive", say=said.append)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_that_are_not_used_are_named(kind, tmp_path):
    rows = {"id": ["7"], "anchor": ["a"], "label": ["1"], "positive": ["b"], "source": ["c"]}
    path, said = tmp_path / f"data.{kind}", []
    if kind == "csv":
        path.write_text("\n".join([",".join(rows), ",".join(row[0] for row in rows.values())]))
    elif kind == "jsonl":
        path.write_text(json.dumps({name: row[0] for name, row in rows.items()}))
    else:
        parquet.write_table(pyarrow.table(rows), path)
    read_data(path, say=said.append)
    assert said == [f"{path}: columns not used: id, label, source"]
    read_data(path, columns="anchor=id,positive=anchor", say=said.append)
    assert said[1:] == [f"{path}: columns not used: label, positive, source"]
    path, said = tmp_path / "index.csv", []
    path.write_text(",text,label\n0,a,1\n")  # as pandas writes the index of its rows
    read_data(path, say=said.append)
    assert said == [f"{path}: columns not used: (no name)"]


def test_a_name_may_be_there_twice_where_it_is_not_used(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("id,anchor,id,positive,q\n1,a,2,b,c\n")
    for columns in (None, "anchor,positive", "anchor=q,positive=positive"):
        assert read_data(path, columns=columns)[0]["positive"][:] == ["b"]
    with pytest.raises(DataError, match="wanted each column once, got 'id' twice"):
        read_data(path, columns="anchor=id,positive=positive")
    path.write_text("id,text,id\n1,one,2\n")
    assert read_corpus(path) == ["one"]


def test_a_header_is_not_taken_for_data(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("question,answer\nhow do I reset the phone,press it for ten seconds\n")
    with pytest.raises(
        DataError, match=r"looks like a header: question, answer\. Map it with --co"
    ):
        read_data(path, columns="anchor,positive")
    assert len(read_data(path, columns="anchor,positive", header=False)[0]) == 2
    dataset, _ = read_data(path, columns="anchor=question,positive=answer")
    assert len(dataset) == 1
    with pytest.raises(DataError, match="wanted the columns anchor, positive too, got ques"):
        read_data(path, columns="anchor,positive", header=True)
    for row in ("how do I reset it,so", "reset,press it for ten seconds"):  # one is long
        path.write_text(f"question,answer\n{row}\n")
        with pytest.raises(DataError, match="looks like a header: question, answer"):
            read_data(path, columns="anchor,positive")


def test_a_first_line_with_a_name_of_columns_is_a_header(tmp_path):
    """One misnamed column would make it a row."""
    path = tmp_path / "data.csv"
    path.write_text("sentence1,sentence2,score\na,b,1\n")
    columns = "sentence1,sentence2,label"
    for given in (columns, "_,sentence2,sentence1,label"):
        with pytest.raises(DataError, match=r"line 1: wanted .*label too, got sentence1, sent"):
            read_data(path, columns=given)
    assert len(read_data(path, columns=columns, header=False)[0]) == 2
    path.write_text("_,a,b\n_,c,d\n")  # what stands for no column names none
    assert len(read_data(path, columns="_,anchor,positive")[0]) == 2


def test_a_file_that_the_system_does_not_read(tmp_path, monkeypatch):
    """Exit code 5 is of what is written."""
    long = f"{'x' * 300}.csv"
    for read in (read_data, read_corpus):
        with pytest.raises(DataError, match=f"{long}: cannot be read: File name too long"):
            read(tmp_path / long)
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    with pytest.raises(DataError, match=r"loop\.csv: cannot be read: "):
        read_data(tmp_path / "loop.csv")
    path = tmp_path / "data.jsonl"
    path.write_text('{"anchor": "a", "positive": "b"}\n')

    def refused(path, *arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def broken(path, *arguments, **options):
        class Broken(io.StringIO):
            def __next__(self):
                raise OSError(errno.EIO, "Input/output error")

        return Broken()

    for opener, said in ((refused, "Permission denied"), (broken, "Input/output error")):
        monkeypatch.setattr(rows, "open", opener, raising=False)
        with pytest.raises(DataError, match=rf"data\.jsonl: cannot be read: {said}"):
            read_data(path)


def test_messages_say_what_to_do(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("sentence1;sentence2;score\na;b;1\n")
    with pytest.raises(DataError, match=r"the header is \(sentence1;.*try --delimiter ';'"):
        read_data(path)
    assert read_data(path, delimiter=";")[0]["score"][:] == [1.0]
    path.write_text("a;b;1\n")
    columns = "sentence1,sentence2,score"
    with pytest.raises(DataError, match="line 1: wanted 3 fields, got 1; try --delimiter ';'"):
        read_data(path, columns=columns)
    assert read_data(path, columns=columns, delimiter=";")[0]["score"][:] == [1.0]
    path.write_text("a,b,1,x\n")
    with pytest.raises(DataError, match=r"wanted 3 fields, got 4; .* `_` for one that is not used"):
        read_data(path, columns=columns)
    assert read_data(path, columns=f"{columns},_")[0]["score"][:] == [1.0]
    path.write_text(f"{columns}\na,b,1\n")
    with pytest.raises(DataError, match=r"line 1 has the names of the columns, .*--no-header"):
        read_data(path, columns=columns, header=False)
    path.write_text("sentence1,sentence2,score\na;b\n")  # no other sign makes it a row
    with pytest.raises(DataError, match=r"line 2: wanted 3 fields, got 1$"):
        read_data(path)
    with pytest.raises(DataError, match=r"delimiter: wanted one character, .*, got ';;'"):
        read_data(path, delimiter=";;")
    path.write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    with pytest.raises(DataError, match=r"try --delimiter '\\t'"):
        read_data(path)
    assert read_data(path, delimiter=r"\t")[0]["score"][:] == [1.0]  # as a shell gives it
    path.write_bytes("anchor,positive\na,b\ncafé,d\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"line 3: wanted .*, got 0xe9 as byte 4 .*; Windows-1252"):
        read_data(path)
    path.write_bytes("anchor,positive\na,b\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"line 1: wanted UTF-8 .* seems to be UTF-16"):
        read_data(path)
    with pytest.raises(DataError, match="wanted a file, got a directory"):
        read_data(tmp_path)
    with pytest.raises(DataError, match=r"^https://host/a//b.csv: wanted a file on this machine"):
        read_data("https://host/a//b.csv")
    path.write_text("anchor,positive\na\0,b\n")
    with pytest.raises(DataError, match=r"line 2: .*NUL"):
        read_data(path)


def test_bad_rows_are_left_out_and_counted(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("anchor,positive\na,b\nc\n,d\ne,f,g\nh,\nk,l\n")
    said = []
    dataset, _ = read_data(path, skip_bad_rows=True, say=said.append)
    assert dataset["anchor"][:] == ["a", "k"]
    assert said[0].startswith("skipped 4 rows: ")
    assert "line 3: wanted 2 fields, got 1" in said[0]
    assert said[0].endswith("and 1 more")
    path.write_text("anchor,positive\nc\n,d\n")
    with pytest.raises(DataError, match=r"one row, got none; skipped 2 rows: .*line 2: wanted"):
        read_data(path, skip_bad_rows=True, say=said.append)


def test_a_malformed_quote_is_a_bad_row(tmp_path):
    """The message names the lines that went with it."""
    path, said = tmp_path / "data.csv", []
    path.write_text('anchor,positive\na,b\n"c" d,e\nf,g\n"h,i\nj,k\n"l",m\nn,"o\np"\n"q,r\ns,t\n')
    dataset, _ = read_data(path, skip_bad_rows=True, say=said.append)
    assert dataset["anchor"][:] == ["a", "f", "n"]
    assert dataset["positive"][:] == ["b", "g", "o\np"]
    assert said[-1].startswith("skipped 3 rows: ")
    for part in (
        "line 3: ',' expected",
        "lines 5 to 7: ',' expected",
        "lines 10 to 11: unexpected",
    ):
        assert part in said[-1]
    with pytest.raises(DataError, match="line 3: ',' expected"):
        read_data(path)
    path.write_text('"a" b,c\nd,e\n')
    with pytest.raises(DataError, match="line 1: ',' expected"):
        read_data(path, columns="anchor,positive", skip_bad_rows=True)


def test_a_line_that_is_no_json_is_a_bad_row(tmp_path):
    path, said = tmp_path / "data.jsonl", []
    good = '{"anchor": "a", "positive": "b"}\n'
    path.write_text(good + '{"anchor": "c"\n' + "[1]\n" + good)
    dataset, _ = read_data(path, skip_bad_rows=True, say=said.append)
    assert len(dataset) == 2
    assert said[-1].startswith("skipped 2 rows: ")
    assert "line 2: not JSON" in said[-1]
    assert "line 3: wanted a JSON object, got [1]" in said[-1]


@pytest.mark.parametrize("columns", [None, "anchor,positive"])
def test_a_format_that_a_file_cannot_have_is_refused(columns, tmp_path):
    """It is of all files; a line of JSON would pass for two fields of CSV."""
    (tmp_path / "pairs.csv").write_text("anchor,positive\na,b\n")
    other = tmp_path / "more.jsonl"
    other.write_text('{"anchor": "a", "positive": "b"}\n')
    with pytest.raises(DataError, match=r"more\.jsonl: wanted csv, .* suffix of jsonl"):
        read_data([tmp_path / "pairs.csv", other], kind="csv", columns=columns)
    zipped = other.rename(tmp_path / "more.parquet.gz")
    with pytest.raises(DataError, match=r"more\.parquet\.gz: wanted json, .* suffix of parquet"):
        read_data(zipped, kind="json", columns=columns)


def test_a_format_corrects_a_suffix(tmp_path):
    lines = tmp_path / "lines.json"
    lines.write_text('{"anchor": "a", "positive": "b"}\n' * 2)
    tabs = tmp_path / "tabs.csv"
    tabs.write_text('anchor\tpositive\na\t"b\n')
    assert len(read_data(lines, kind="jsonl")[0]) == 2
    assert read_data(tabs, kind="tsv")[0]["positive"][:] == ['"b']


def test_parquet_that_is_damaged_or_packed(tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    texts = [f"text {number}" for number in range(2000)]
    parquet.write_table(pyarrow.table({"anchor": texts, "positive": texts}), path)
    packed = tmp_path / "data.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"data\.parquet\.gz: wanted Parquet without .* gunzip"):
        read_data(packed)
    whole = bytearray(path.read_bytes())
    for place in (slice(4, 600), slice(-600, -8)):  # of the values, of what says where they are
        damaged = whole.copy()
        damaged[place] = b"\xff" * len(damaged[place])
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            read_data(path)
        assert str(caught.value).startswith(f"{path}: not Parquet, or damaged: ")
        assert "\n" not in str(caught.value)

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(parquet, "ParquetFile", refused)
    with pytest.raises(DataError, match=rf"{path}: cannot be read: Permission denied"):
        read_data(path)
