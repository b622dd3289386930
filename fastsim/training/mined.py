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
    found = [None] * len(anchors)
    seed = limits.pop("seed", 0)
    for number, pairs_alike in enumerate(_groups([len(known[query]) for query in asked])):
        rows_asked = [asked[pair] for pair in pairs_alike]
        chosen, _ = mine_hard_negatives(
            queries[torch.tensor(rows_asked)],
            vectors,
            _table([answers[pair] for pair in pairs_alike], [known[row] for row in rows_asked]),
            count=count,
            seed=seed + number,  # or the draws of one group would be those of another
            **limits,
        )
        for pair, rows in zip(pairs_alike, chosen.tolist(), strict=True):
            found[pair] = rows
    names = ["negative", *(f"negative_{number}" for number in range(2, count + 1))]
    written = []
    for anchor, positive, rows in zip(anchors, positives, found, strict=True):
        if -1 not in rows:
            negatives = zip(names, (texts[row] for row in rows), strict=True)
            written.append({"anchor": anchor, "positive": positive, **dict(negatives)})
    return written, len(anchors) - len(written)


def _groups(counts):
    """Numbers of pairs in groups of counts within a factor of two.

    A group is searched as deep as its largest count, with as many columns: one anchor of thousands
    of positives would else make all pairs as wide.
    """
    groups = defaultdict(list)
    for pair, count in enumerate(counts):
        groups[count.bit_length()].append(pair)
    return groups.values()


def _table(answers, known):
    """(N, P): the corpus row of each pair's positive, then all rows known to be no negatives."""
    table = torch.full((len(answers), 1 + max(map(len, known))), -1)
    for place, (answer, rows) in enumerate(zip(answers, known, strict=True)):
        table[place, 0] = answer
        table[place, 1 : 1 + len(rows)] = torch.tensor(list(rows))
    return table


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
