"""Retrieval evaluation: corpus, queries and judgements in the layout of BEIR.

Source of the layout: Thakur et al. 2021, "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation
of Information Retrieval Models": corpus.jsonl (_id, title, text), queries.jsonl (_id, text),
qrels/SPLIT.tsv (query-id, corpus-id, score). nDCG has linear gains, as trec_eval.
"""

import math
from collections import defaultdict
from pathlib import Path

from fastsim.dot_products import as_cosines
from fastsim.scores import top_k
from fastsim.training.data import DataError
from fastsim.training.evaluation import check_vectors
from fastsim.training.rows import check_file, delimited_rows, named_rows, raise_malformed
from fastsim.training.similarity import similarity_of
from fastsim.training.values import checked_text

_QUERIES = 1024  # searched at a time


def read_beir(folder, split="test"):
    """({id: text} of the corpus, {id: text} of the queries, {query: {document: grade}})."""
    folder = Path(folder)
    corpus = _texts(folder / "corpus.jsonl", ("title", "text"), may_be_empty=True)
    queries = _texts(folder / "queries.jsonl", ("text",))
    file = check_file(folder / "qrels" / f"{split}.tsv")
    grades = defaultdict(dict)
    for where, row in raise_malformed(delimited_rows(file, "tsv")):
        if where == "line 1" and row[-1].strip().lower() == "score":
            continue
        try:
            query, document, grade = row[0], row[-2], int(row[-1])
        except (ValueError, IndexError) as error:
            hint = "; a header ends in score" if where == "line 1" else ""
            raise DataError(
                f"{file}, {where}: wanted query-id, corpus-id and an integer score, got"
                f" {', '.join(row)!r:.80}{hint}"
            ) from error
        for name, ids, key in (("queries", queries, query), ("corpus", corpus, document)):
            if key not in ids:
                raise DataError(f"{file}, {where}: {key!r} is not in {name}.jsonl")
        earlier = grades[query].setdefault(document, grade)
        if earlier != grade:
            raise DataError(
                f"{file}, {where}: {document!r} is judged {earlier} and {grade} for {query!r}"
            )
    judged = {query: marks for query, marks in grades.items() if max(marks.values()) > 0}
    if not judged:
        raise DataError(f"{file}: no query has a document with a score above 0")
    return corpus, queries, judged


def _texts(path, fields, may_be_empty=False):
    """{id: the texts of the fields, joined}. may_be_empty: as some documents of FiQA in BEIR."""
    texts = {}
    for where, row in raise_malformed(named_rows(check_file(path), "jsonl")):
        parts = [
            checked_text(row[field], field, path, where)
            for field in fields
            if not _is_empty(row.get(field))
        ]
        empty = may_be_empty and isinstance(row.get(fields[-1]), str)  # the field has to exist
        if "_id" not in row or not (parts or empty):
            names = ", ".join(map(str, row))
            raise DataError(
                f"{path}, {where}: wanted _id and {fields[-1]}, got {names or 'nothing'}"
            )
        if str(row["_id"]) in texts:
            raise DataError(f"{path}, {where}: wanted each _id once, got {row['_id']!r} twice")
        texts[str(row["_id"])] = " ".join(parts).strip()
    return texts


def _is_empty(value):
    return value is None or (isinstance(value, str) and not value.strip())


def evaluate_retrieval(encoder, folder, *, split="test", depth=100, batch_size=32):
    """nDCG@10, MRR@10, recall@10 and recall@depth of an encoder's search, averaged over queries.

    A document with the id of a query is left out of its results. Documents and queries are encoded
    with the encoder's prompts for them, and compared by its own similarity, cosine or dot;
    ModelError for any other.
    """
    similarity = similarity_of(encoder)
    corpus, queries, grades = read_beir(folder, split)
    document_ids, query_ids = list(corpus), list(grades)
    documents = encoder.encode_document(list(corpus.values()), batch_size=batch_size)
    questions = encoder.encode_query([queries[query] for query in query_ids], batch_size=batch_size)
    check_vectors(documents)
    check_vectors(questions)
    questions, documents, _ = as_cosines(questions, documents, similarity)
    runs = {}
    for start in range(0, len(query_ids), _QUERIES):
        part = slice(start, start + _QUERIES)
        _, nearest = top_k(questions[part], documents, min(depth + 1, len(document_ids)))
        for query, rows in zip(query_ids[part], nearest.tolist(), strict=True):
            ids = (document_ids[row] for row in rows)
            runs[query] = [document for document in ids if document != query][:depth]
    return ranking_metrics(runs, grades, depth)


def ranking_metrics(runs, grades, depth=100):
    """Metrics of {query: ranked documents} against {query: {document: grade}}."""
    depths = sorted({10, depth})
    names = ["ndcg@10", "mrr@10", *(f"recall@{k}" for k in depths)]
    sums = dict.fromkeys(names, 0.0)
    for query, marks in grades.items():
        gains = [marks.get(document, 0) for document in runs[query]]
        ideal = _dcg(sorted(marks.values(), reverse=True)[:10])
        sums["ndcg@10"] += _dcg(gains[:10]) / ideal
        first = next((place for place, gain in enumerate(gains[:10], start=1) if gain > 0), None)
        sums["mrr@10"] += 1 / first if first else 0.0
        relevant = sum(grade > 0 for grade in marks.values())
        for k in depths:
            sums[f"recall@{k}"] += sum(gain > 0 for gain in gains[:k]) / relevant
    return {name: value / len(grades) for name, value in sums.items()}


def _dcg(gains):
    return sum(max(gain, 0) / math.log2(place + 2) for place, gain in enumerate(gains))
