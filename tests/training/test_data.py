"""Reading data: every fault stops with file, line and reason."""

import json
import math
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
    with pytest.raises(DataError, match="together: wanted with tuples or labelled texts, got scor"):
        read_data(path, columns="together=scene,sentence1=a,sentence2=b,score=scene")
    path.write_text("text,label,together\none,1,\n")
    with pytest.raises(DataError, match="line 2: together: wanted a class, got ''"):
        read_data(path)


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
    "twice": ("csv", "anchor,positive,anchor\na,b,c\n", "column 'anchor' is there twice"),
    "no rows": ("csv", "anchor,positive\n", "no rows"),
    "nothing": ("csv", "", "no rows"),
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
    path.write_text("s1,s2,gold\na,b,1\n")
    with pytest.raises(DataError, match=r"line 1: score: .*does the file have a header"):
        read_data(path, columns="sentence1,sentence2,score")
    with pytest.raises(DataError, match="no column other; it has s1, s2, gold"):
        read_data(path, columns="sentence1=s1,sentence2=other,score=gold")
    with pytest.raises(DataError, match="got 'sentense1'"):
        read_data(path, columns="sentense1,sentence2,score")
    with pytest.raises(DataError, match="for all of them or for none"):
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
        f"{path}: taken for a file without a header; line 1 is a row: anchor 'q', positive 'a'"
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


def test_a_name_may_be_there_twice_where_it_is_not_used(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("id,anchor,id,positive,q\n1,a,2,b,c\n")
    for columns in (None, "anchor,positive", "anchor=q,positive=positive"):
        assert read_data(path, columns=columns)[0]["positive"][:] == ["b"]
    with pytest.raises(DataError, match="column 'id' is there twice"):
        read_data(path, columns="anchor=id,positive=positive")
    path.write_text("id,text,id\n1,one,2\n")
    assert read_corpus(path) == ["one"]


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
        ("text,text\n1,2\n", "column 'text' is there twice"),
    ):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(DataError, match=reason):
            read_corpus(tmp_path / "b.csv")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"title": "two"}\n')
    with pytest.raises(DataError, match="line 2: no column text"):
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
    with pytest.raises(DataError, match="no column anchor, positive; it has question, answer"):
        read_data(path, columns="anchor,positive", header=True)


def test_messages_say_what_to_do(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("sentence1;sentence2;score\na;b;1\n")
    with pytest.raises(DataError, match=r"the header is \(sentence1;.*try --delimiter ';'"):
        read_data(path)
    assert read_data(path, delimiter=";")[0]["score"][:] == [1.0]
    with pytest.raises(DataError, match=r"delimiter: wanted one character, .*, got ';;'"):
        read_data(path, delimiter=";;")
    path.write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    with pytest.raises(DataError, match=r"try --delimiter '\\t'"):
        read_data(path)
    assert read_data(path, delimiter=r"\t")[0]["score"][:] == [1.0]  # as a shell gives it
    path.write_bytes("anchor,positive\na,b\ncafé,d\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"line 3: wanted UTF-8 text, byte 4 .* 0xe9; Windows-1252"):
        read_data(path)
    path.write_bytes("anchor,positive\na,b\n".encode("utf-16"))
    with pytest.raises(DataError, match="line 1: wanted UTF-8 text, this seems to be UTF-16"):
        read_data(path)
    with pytest.raises(DataError, match="this is a directory"):
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
    assert said[0].startswith("left out 4 rows: ")
    assert "line 3: wanted 2 fields, got 1" in said[0]
    assert said[0].endswith("and 1 more")


def test_a_malformed_quote_is_a_bad_row(tmp_path):
    """The message names the lines that went with it."""
    path, said = tmp_path / "data.csv", []
    path.write_text('anchor,positive\na,b\n"c" d,e\nf,g\n"h,i\nj,k\n"l",m\nn,"o\np"\n"q,r\ns,t\n')
    dataset, _ = read_data(path, skip_bad_rows=True, say=said.append)
    assert dataset["anchor"][:] == ["a", "f", "n"]
    assert dataset["positive"][:] == ["b", "g", "o\np"]
    assert said[-1].startswith("left out 3 rows: ")
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
    assert said[-1].startswith("left out 2 rows: ")
    assert "line 2: not JSON" in said[-1]
    assert "line 3: wanted a JSON object, got [1]" in said[-1]


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


def test_columns_of_arrow_are_read_as_rows_are(tmp_path, monkeypatch):
    """Classes that are numbers, scores that are integers, other types of text: the same values."""
    from fastsim.training import tables

    given = [
        {"sentence1": ["a ", "b"], "sentence2": ["c", "d"], "score": [1, 0]},
        {"sentence1": ["a"], "sentence2": ["c"], "score": pyarrow.array([0.5], pyarrow.float32())},
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
    with pytest.raises(DataError, match=r"row 1: no column text; it has question, answer"):
        read_corpus(f"hub:{folder}")
    with pytest.raises(DataError, match="hub:a::b: wanted hub:NAME, hub:NAME:SPLIT"):
        read_data("hub:a::b")


def test_many_rows_are_mapped_from_a_file(tmp_path, monkeypatch):
    from fastsim.training import opened, store

    monkeypatch.setattr(store, "_IN_MEMORY", 20)
    monkeypatch.setattr(opened, "_PART", 7)
    path = tmp_path / "data.tsv"
    path.write_text("anchor\tpositive\n" + "".join(f"a{i}\tb{i}\n" for i in range(50)))
    dataset, _ = read_data(path)
    assert dataset.cache_files
    assert dataset.to_list() == [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(50)]
