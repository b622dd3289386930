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
    columns, kind, delimiter, header: as of `read_data`. limits: those of `mine_hard_negatives`. A
    text that is a positive of the anchor anywhere in the file, or the anchor itself, is no
    negative of it. Pairs with fewer than count negatives within the limits are left out.
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
    texts = list(dict.fromkeys(positives))
    if corpus is not None:
        texts = list(dict.fromkeys([*texts, *read_corpus(corpus)]))
    place = {text: row for row, text in enumerate(texts)}
    unique = list(dict.fromkeys(anchors))
    row_of = {text: row for row, text in enumerate(unique)}
    queries = check_vectors(encoder.encode_query(unique, batch_size=batch_size))
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    known = defaultdict(dict)  # anchor -> the corpus rows that are no negatives, in order
    for anchor, positive in zip(anchors, positives, strict=True):
        known[anchor][place[positive]] = None
    for anchor in unique:
        if anchor in place:
            known[anchor][place[anchor]] = None
    table = torch.full((len(anchors), 1 + max(map(len, known.values()))), -1)
    for row, (anchor, positive) in enumerate(zip(anchors, positives, strict=True)):
        table[row, 0] = place[positive]
        table[row, 1 : 1 + len(known[anchor])] = torch.tensor(list(known[anchor]))
    rows, _ = mine_hard_negatives(
        queries[torch.tensor([row_of[anchor] for anchor in anchors])],
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
    if not path.exists():
        check_new_file("output", path)
        return
    for name in read:
        if name is not None and Path(name).exists() and path.samefile(name):
            raise OutputError(f"output: wanted another file than those read, got {str(path)!r}")
    if not overwrite:
        raise OutputError(f"output: {str(path)!r} is there already; --overwrite writes over it")
    if not path.is_file():
        raise OutputError(f"output: wanted a file, {str(path)!r} is none")


def write_rows(rows, path):
    """JSON lines that are there whole or not at all; `OutputError` where they cannot be."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
