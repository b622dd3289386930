"""Finds hard negatives for pairs with an encoder: what `fastsim mine` writes."""

import json
from collections import defaultdict
from pathlib import Path

import torch

from fastsim.files import OutputError, check_new_file, write_whole
from fastsim.mining import mine_hard_negatives
from fastsim.training.data import DataError, read_corpus, read_data
from fastsim.training.evaluation import check_vectors
from fastsim.training.rows import SUFFIXES, suffix_of
from fastsim.training.similarity import ranking_similarity


def mine(encoder, pairs, *, corpus=None, columns=None, kind=None, delimiter=None, header=None,
         batch_size=32, count=1, seed=0, **limits):  # fmt: skip
    """([{anchor, positive, negative, ...}], the number of pairs that were left out).

    pairs: a file of anchors and positives. corpus: a file of texts besides the positives. columns,
    kind, delimiter, header: as for `read_data`; the last three apply to the corpus too. limits: the
    options of `mine_hard_negatives`, in the unit of the encoder's similarity: dot products for
    "dot", otherwise cosines. Neither the anchor itself nor any of its positives in the file is a
    negative; texts that differ only in white space count as equal. Pairs with fewer than `count`
    negatives within the limits are left out.
    """
    how = {"kind": kind, "delimiter": delimiter, "header": header}
    anchors, positives = _read_pairs(pairs, columns=columns, **how)
    further = [] if corpus is None else read_corpus(corpus, **how)
    texts, text_row = _distinct([*positives, *further])
    unique, anchor_row = _distinct(anchors)
    queries = check_vectors(encoder.encode_query(unique, batch_size=batch_size))
    vectors = check_vectors(encoder.encode_document(texts, batch_size=batch_size))
    query_rows = [anchor_row[_words(anchor)] for anchor in anchors]
    answers = [text_row[_words(positive)] for positive in positives]
    excluded = _excluded(query_rows, answers, anchor_row, text_row)
    negative_rows = [None] * len(anchors)
    for number, group in enumerate(_groups([len(excluded[query]) for query in query_rows])):
        group_queries = [query_rows[pair] for pair in group]
        negatives, _ = mine_hard_negatives(
            queries[torch.tensor(group_queries)],
            vectors,
            _table([answers[pair] for pair in group], [excluded[row] for row in group_queries]),
            count=count,
            seed=seed + number,  # so that groups draw different random numbers
            similarity=ranking_similarity(encoder),
            **limits,
        )
        for pair, rows in zip(group, negatives.tolist(), strict=True):
            negative_rows[pair] = rows
    names = ["negative", *(f"negative_{number}" for number in range(2, count + 1))]
    result = []
    for anchor, positive, rows in zip(anchors, positives, negative_rows, strict=True):
        if -1 not in rows:
            negatives = zip(names, (texts[row] for row in rows), strict=True)
            result.append({"anchor": anchor, "positive": positive, **dict(negatives)})
    return result, len(anchors) - len(result)


def _read_pairs(pairs, **options):
    """(anchors, positives) of a file; `DataError` if it has other columns."""
    dataset, layout = read_data(pairs, **options)
    if layout.columns != ("anchor", "positive"):
        raise DataError(
            f"{pairs}: wanted only the columns anchor and positive, got"
            f" {', '.join(layout.columns)}; select them with --columns anchor,positive"
        )
    return dataset["anchor"][:], dataset["positive"][:]


def _excluded(query_rows, answers, anchor_row, text_row):
    """{row of an anchor: ordered set of the rows of texts that are none of its negatives}."""
    excluded = defaultdict(dict)
    for query, answer in zip(query_rows, answers, strict=True):
        excluded[query][answer] = None
    for words, query in anchor_row.items():
        if words in text_row:
            excluded[query][text_row[words]] = None
    return excluded


def _groups(counts):
    """The indices of the counts, in groups whose counts differ by less than a factor of two.

    The cost of each pair in a group grows with the largest count: without groups, one anchor with
    thousands of positives would make all pairs expensive.
    """
    groups = defaultdict(list)
    for pair, count in enumerate(counts):
        groups[count.bit_length()].append(pair)
    return groups.values()


def _table(answers, excluded):
    """(N, P): the row of each pair's positive, then its excluded rows, then -1."""
    table = torch.full((len(answers), 1 + max(map(len, excluded))), -1)
    for pair, (answer, rows) in enumerate(zip(answers, excluded, strict=True)):
        table[pair, 0] = answer
        table[pair, 1 : 1 + len(rows)] = torch.tensor(list(rows))
    return table


def _words(text):
    """A text with single spaces: texts that differ only in white space count as equal."""
    return " ".join(text.split())


def _distinct(texts):
    """([the first of equal texts], {its words: its index})."""
    first = {}
    for text in texts:
        first.setdefault(_words(text), text)
    return list(first.values()), {words: row for row, words in enumerate(first)}


def check_output(path, *read, overwrite=False):
    """`OutputError` if `write_rows` would fail, or would overwrite a file that must be kept.

    read: the files that are read; None for one that is not. overwrite: whether to overwrite other
    files.
    """
    path = Path(path)
    # A file with the suffix of another format could not be read again.
    if path.suffix.lower() == ".gz" or SUFFIXES.get(suffix_of(path), "jsonl") != "jsonl":
        raise OutputError(
            f"output: wanted a name that ends in .jsonl, since JSON lines are written, got"
            f" {str(path)!r}"
        )
    if path.exists():
        for name in read:
            if name is not None and Path(name).exists() and path.samefile(name):
                raise OutputError(f"output: wanted another file than those read, got {str(path)!r}")
        if not path.is_file():
            raise OutputError(f"output: wanted a file, got {str(path)!r}")
        if not overwrite:
            raise OutputError(f"output: {str(path)!r} exists; --overwrite replaces it")
    check_new_file("output", path)


def write_rows(rows, path, *, overwrite=False):
    """Write the rows as JSON lines, all or none; `OutputError` if they cannot be written.

    overwrite: whether to overwrite a file at `path`; otherwise it is renamed to its name with
    `.old`. `check_output` refuses a file that was there before the work.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, text, keep=not overwrite)
