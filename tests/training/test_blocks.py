"""CSV and TSV read by blocks: the same data and the same errors as row by row."""

import csv
import gzip
import io
import random
import sys

import pytest

pytest.importorskip("datasets")
from fastsim.training import blocks, data, opened
from tests.seeds import seed_of

CELLS = [
    "a plane", "two, with a comma", 'he said "no"', '"', "5\" disk", '""', "two\nlines",
    "two\r\nlines", "a\rreturn", "tab\there", "", " ", "  spaces  ", "NA", "nan", "None", "null",
    "-", "#N/A", "é ü",
    "\u2003", "\u4e2d\u6587", "\ufeffmark", "a\x00b", "x" * 300, "1e3", "0", "1_000",
    "\x1c", "a\\", "'q'", ";",
]  # fmt: skip
NUMBERS = [
    "1",
    "0.5",
    "-2",
    "1e3",
    "+3",
    ".5",
    "5.",
    " 4 ",
    "1E-3",
    "1e-400",
    "4.35",
    "123456789.1",
]
STRANGE = ["nan", "inf", "1_000", "\u0661", "x", "", "1e400", "0x10", "1,5", "1e", "1\u2003", "--1"]
HEADS = {
    "sentence1,sentence2,score": (2, True),
    "anchor,positive,negative": (3, False),
    "id,text,label": (3, False),
    "together,anchor,positive,more": (4, False),
}


def rarely(chance, usual, rare, one_in):
    """One of the usual; now and then one of the rare."""
    return chance.choice(usual if chance.randrange(one_in) else rare)


def written(path, chance, kind, mark):
    """A file of some rows that may be strange: mostly texts of one alphabet, some of many kinds."""
    head = chance.choice(list(HEADS))
    texts, scored = HEADS[head]
    plain = [cell for cell in CELLS if cell.strip() and not set(cell) & set(f'"\r\n\0{mark}')]
    strange = chance.choice([10**9, 60, 15])  # one cell of so many
    rows = []
    for _ in range(chance.choice([0, 1, 3, 40])):
        row = [rarely(chance, plain, CELLS, strange) for _ in range(texts)]
        row += [rarely(chance, NUMBERS, STRANGE, strange)] if scored else []
        row += ["more"] * (chance.randrange(3 * strange) == 0)
        rows.append(row[: -1 if chance.randrange(3 * strange) == 0 else None])
    end = chance.choice(["\n", "\r\n", "\r"] if chance.randrange(8) == 0 else ["\n", "\r\n"])
    text = io.StringIO()
    if kind == "tsv" or chance.randrange(3) == 0:  # without any care for quotes
        lines = [mark.join(row) for row in [head.split(","), *rows]]
        text.write("".join(line + end for line in lines))
    else:
        quoting = chance.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
        if sys.version_info < (3, 11):  # whose csv writes no NUL
            rows = [[cell.replace("\0", "") for cell in row] for row in rows]
        writer = csv.writer(text, delimiter=mark, quoting=quoting, lineterminator=end)
        writer.writerows([head.split(","), *rows])
    text = text.getvalue()
    places = [place for place, sign in enumerate(text) if sign == "\n"]
    if places and chance.randrange(4) == 0:
        place = chance.choice(places) + 1
        text = (
            text[:place] + chance.choice(["\n", "\r\n", " \n", '""\n', f"{mark}\n"]) + text[place:]
        )
    text = text.rstrip("\r\n") if chance.randrange(4) == 0 else text
    content = text.encode()
    if chance.randrange(20) == 0 and content:
        place = chance.randrange(len(content))
        content = content[:place] + b"\xff" + content[place + 1 :]
    if chance.randrange(4) == 0:
        content = b"\xef\xbb\xbf" + content
    if path.suffix == ".gz":
        content = gzip.compress(content)
        content = content[: -chance.randrange(30)] if chance.randrange(5) == 0 else content
    path.write_bytes(content)


def outcome(path, **options):
    """What a file holds, or what is wrong with it; what was said."""
    said = []
    try:
        dataset, layout = data.read_data(path, say=said.append, **options)
    except data.DataError as error:
        return str(error), said
    return (layout, dataset.to_dict()), said


KINDS = ("csv", "tsv", "csv.gz")


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_rows_read_the_same(kind, part, tmp_path, monkeypatch):
    chance = random.Random(seed_of(10 * KINDS.index(kind) + part))
    by_blocks, failed = 0, 0
    tables = blocks.delimited_tables

    def counted(*args, **options):
        nonlocal by_blocks
        for table in tables(*args, **options):
            by_blocks += table is not None
            yield table

    for number in range(40):
        mark = chance.choice([None, None, ";", "|", "\t"])
        usual = "\t" if kind == "tsv" else ","
        path = tmp_path / f"{number}.{kind}"
        written(path, chance, kind, mark or usual)
        options = {"delimiter": mark, "skip_bad_rows": chance.randrange(3) == 0}
        with monkeypatch.context() as patch:
            patch.setattr(opened, "_PART", 16)
            patch.setattr(opened, "delimited_tables", lambda *_, **__: iter([None]))
            wanted = outcome(path, **options)
            patch.setattr(opened, "delimited_tables", counted)
            for size in (16, 200, 8 << 20):  # bytes of a block
                patch.setattr(blocks, "_BLOCK", size)
                assert outcome(path, **options) == wanted, path.read_bytes()
        failed += isinstance(wanted[0], str)
    assert 0 < failed < 40
    assert by_blocks > 40


@pytest.mark.parametrize("column", ["id", "text", "label"])
def test_a_byte_that_is_not_utf_8_is_found_far_down(column, tmp_path):
    """In a column that is not used too, and beyond what a text file decodes at a time."""
    names, line = ["id", "text", "label"], 3000
    rows = [[f"{name} {number % 7}".encode() for name in names] for number in range(2, 4000)]
    rows[line - 2][names.index(column)] += b"\xff"
    path = tmp_path / "data.csv"
    path.write_bytes(b"\n".join([b"id,text,label", *map(b",".join, rows)]))
    assert path.read_bytes().index(b"\xff") > io.DEFAULT_BUFFER_SIZE
    with pytest.raises(data.DataError, match=rf"line {line}: wanted UTF-8 text, got 0xff"):
        data.read_data(path)
