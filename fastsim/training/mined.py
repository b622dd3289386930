"""Pairs with hard negatives from a corpus, found by an encoder: what `fastsim mine` writes."""

import json
from collections import defaultdict
from pathlib import Path

import torch

from fastsim.files import OutputError, check_new_file, write_whole
from fastsim.mining import mine_hard_negatives
from fastsim.training.data import DataError, read_corpus, read_data
from fastsim.training.evaluation import check_vectors
from fastsim.training.rows import SUFFIXES, suffix_of


def mine(encoder, pairs, *, corpus=None, columns=None, kind=None, delimiter=None, header=None,
         batch_size=32, count=1, **limits):  # fmt: skip
    """(rows of anchor, positive, negative, ... as dictionaries, how many pairs were left out).

    pairs: a file of anchors and positives; corpus: a file of texts besides the positives.
    columns, kind, delimiter, header: as of `read_data`, the last three of the corpus too. limits:
    those of `mine_hard_negatives`. A text that is a positive of the anchor anywhere in the file, or
    the anchor itself, is no negative of it, whatever the spaces between its words. Pairs with fewer
    than count negatives within the limits are left out.
    """
    dataset, layout = read_data(
        pairs, columns=columns, kind=kind, delimiter=delimiter, header=header
    )
    if layout.columns != ("anchor", "positive"):
        found = ", ".join(layout.columns)
        raise DataError(
            f"{pairs}: wanted the columns anchor and positive alone, got {found}; choose them with"
            " --columns anchor,positive"
        )
    anchors, positives = dataset["anchor"][:], dataset["positive"][:]
    further = (
        [] if corpus is None else read_corpus(corpus, kind=kind, delimiter=delimiter, header=header)
    )
    texts, place = _distinct([*positives, *further])
    unique, row_of = _distinct(anchors)
    queries = check_vectors(encoder.encode_query(unique, batch_size=batch_size))
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    asked = [row_of[_words(anchor)] for anchor in anchors]
    answers = [place[_words(positive)] for positive in positives]
    known = defaultdict(dict)  # row of an anchor -> the corpus rows that are no negatives, in order
    for query, answer in zip(asked, answers, strict=True):
        known[query][answer] = None
    for words, query in row_of.items():
        if words in place:
            known[query][place[words]] = None
    table = torch.full((len(anchors), 1 + max(map(len, known.values()))), -1)
    for row, (query, answer) in enumerate(zip(asked, answers, strict=True)):
        table[row, 0] = answer
        table[row, 1 : 1 + len(known[query])] = torch.tensor(list(known[query]))
    rows, _ = mine_hard_negatives(
        queries[torch.tensor(asked)],
        vectors,
        table,
        count=count,
        **limits,
    )
    names = ["negative", *(f"negative_{number}" for number in range(2, count + 1))]
    found = []
    for anchor, positive, chosen in zip(anchors, positives, rows.tolist(), strict=True):
        if -1 not in chosen:
            negatives = zip(names, (texts[row] for row in chosen), strict=True)
            found.append({"anchor": anchor, "positive": positive, **dict(negatives)})
    return found, len(anchors) - len(found)


def _words(text):
    """What a text is known by: one with other spaces is no other text."""
    return " ".join(text.split())


def _distinct(texts):
    """(texts of different words, as each is written first; {words: their row})."""
    first = {}
    for text in texts:
        first.setdefault(_words(text), text)
    return list(first.values()), {words: row for row, words in enumerate(first)}


def check_output(path, *read, overwrite=False):
    """`OutputError` where `write_rows` would fail, write over a file that is read, or over another.

    read: files, or None. overwrite: whether a file that is there may be written over.
    """
    path = Path(path)
    # A name that promises something else could not be read again.
    if path.suffix.lower() == ".gz" or SUFFIXES.get(suffix_of(path), "jsonl") != "jsonl":
        raise OutputError(
            f"output: wanted a name that ends in .jsonl, since JSON lines are written, got"
            f" {str(path)!r}"
        )
    if path.exists():
        for name in read:
            if name is not None and Path(name).exists() and path.samefile(name):
                raise OutputError(f"output: wanted another file than those read, got {str(path)!r}")
        if not overwrite:
            raise OutputError(f"output: {str(path)!r} is there already; --overwrite writes over it")
        if not path.is_file():
            raise OutputError(f"output: wanted a file, {str(path)!r} is none")
    check_new_file("output", path)


def write_rows(rows, path):
    """JSON lines that are there whole or not at all; `OutputError` where they cannot be."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
