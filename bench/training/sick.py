"""SICK in the forms that experiments train on and are judged by, each written as one file.

A function takes a folder and a part, train or test, and returns the path of what it wrote.
"""

import csv
import json

from bench.training.folders import DATA
from fastsim.training.links import connected


def sick_rows(part):
    """The rows of a part of SICK: train or test."""
    with open(sick_file(part), encoding="utf-8") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


def sick_file(part):
    """The file of a part of SICK, as it was published."""
    return DATA / "sick" / {"train": "SICK_train.txt", "test": "SICK_test_annotated.txt"}[part]


def entailment_pairs(folder, part):
    """(anchor, positive) of the ENTAILMENT pairs."""
    rows = [
        {"anchor": row["sentence_A"], "positive": row["sentence_B"]}
        for row in sick_rows(part)
        if is_entailed(row)
    ]
    return write_rows(folder / f"{part}_pairs.jsonl", rows)


def paraphrase_groups(folder, part):
    """(text, label, together) of the scenes that hold paraphrases.

    A scene, what comes together, is what pairs of any judgment connect: variants of a sentence,
    its negations and its neighbours. A label is what paraphrases connect within it.
    """
    pairs = [(row["sentence_A"], row["sentence_B"], is_paraphrase(row)) for row in sick_rows(part)]
    scenes = connected((one, other) for one, other, _ in pairs)
    groups = connected((one, other) for one, other, same in pairs if same)
    wanted = {scenes[text] for text in groups}
    rows = [
        {"text": text, "label": groups.get(text, text), "together": scene}
        for text, scene in scenes.items()
        if scene in wanted
    ]
    return write_rows(folder / f"{part}_groups.jsonl", rows)


def paraphrase_pairs(folder, part):
    """(sentence1, sentence2, label): 1 for a paraphrase."""
    return _pairs(folder / f"{part}_paraphrases.jsonl", part, "label", is_paraphrase)


def entailed(folder, part):
    """(sentence1, sentence2, label): 1 for ENTAILMENT."""
    return _pairs(folder / f"{part}_entailed.jsonl", part, "label", is_entailed)


def related(folder, part):
    """(sentence1, sentence2, score): the relatedness in [0, 1]."""
    return _pairs(folder / f"{part}_related.jsonl", part, "score", _relatedness)


def _pairs(path, part, column, judge):
    """Every pair of a part, with a column of numbers from its row."""
    rows = [
        {
            "sentence1": row["sentence_A"],
            "sentence2": row["sentence_B"],
            column: judge(row),
        }
        for row in sick_rows(part)
    ]
    return write_rows(path, rows)


def is_entailed(row):
    """1 where the first sentence entails the second, else 0."""
    return int(row["entailment_judgment"] == "ENTAILMENT")


def is_paraphrase(row):
    """1 where the sentences mean the same, else 0."""
    return int(is_entailed(row) and float(row["relatedness_score"]) >= 4.5)


def _relatedness(row):
    return (float(row["relatedness_score"]) - 1) / 4


def retrieval_set(folder, part):
    """SICK as a search, in the layout of BEIR: entailed sentences among all of its sentences.

    A query is a sentence, its answers are the sentences that it entails.
    """
    rows = sick_rows(part)
    answers = {}
    for row in rows:
        if is_entailed(row) and row["sentence_A"] != row["sentence_B"]:
            answers.setdefault(row["sentence_A"], set()).add(row["sentence_B"])
    texts = {text for row in rows for text in (row["sentence_A"], row["sentence_B"])}
    ids = {text: f"d{number}" for number, text in enumerate(sorted(texts))}
    (folder / "qrels").mkdir(parents=True)
    write_rows(folder / "corpus.jsonl", [{"_id": ids[text], "text": text} for text in ids])
    # With its document's id, so that a query is not its own answer.
    write_rows(folder / "queries.jsonl", [{"_id": ids[text], "text": text} for text in answers])
    lines = [
        f"{ids[q]}\t{ids[text]}\t1\n" for q, found in answers.items() for text in sorted(found)
    ]
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
