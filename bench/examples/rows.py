"""Made-up rows with the columns of the data sets that sentence-transformers' scripts load."""

import random
import re
import zlib

from datasets import Dataset, DatasetDict

from fastsim.training import demo

ROWS = 96
SPLITS = ("train", "validation", "dev", "eval", "test")
WORDS = sorted(
    {
        word
        for rows in demo.situations()
        for row in rows
        for text in row
        for word in re.findall(r"\w+", text.lower())
    }
)

_PAIR, _TRIPLET, _SCORED = "sentence1 sentence2", "anchor positive negative", "score:score"
_CAPTIONS, _SIMPLE = "caption1 caption2", "text simplified"
_NEGATIVES = " ".join(f"negative_{n}:any" for n in range(1, 51))
# name of a data set, or with "/" and the name of its part -> its columns, each with what it holds:
# text where nothing is said.
COLUMNS = {
    "BeIR/quora": "_id:key title text",
    "BeIR/quora-qrels": "query-id:any corpus-id:any score:score",
    "jxie/flickr8k": "image caption_0",
    "lightonai/ms-marco-en-bge-gemma/documents": "document_id:key text",
    "lightonai/ms-marco-en-bge-gemma/queries": "query_id:key text",
    "lightonai/ms-marco-en-bge-gemma/train": "query_id:key document_ids:keys scores:scores",
    "mteb/sts17-crosslingual-sts": f"{_PAIR} {_SCORED}",
    "omkar334/trec": "text coarse_label:6 fine_label:6",
    "sentence-transformers/all-nli/pair-class": "premise hypothesis label:3",
    "sentence-transformers/all-nli/pair-score": f"{_PAIR} {_SCORED}",
    "sentence-transformers/all-nli/triplet": _TRIPLET,
    "sentence-transformers/altlex": _SIMPLE,
    "sentence-transformers/askubuntu": "query positive:texts negative:texts",
    "sentence-transformers/askubuntu-questions": "text",
    "sentence-transformers/coco-captions": _CAPTIONS,
    "sentence-transformers/flickr30k-captions": _CAPTIONS,
    "sentence-transformers/gooaq": "question answer",
    "sentence-transformers/msmarco/bert-ensemble-margin-mse": (
        "query_id:any positive_id:any negative_id:any score:score"
    ),
    "sentence-transformers/msmarco/corpus": "passage_id:key passage",
    "sentence-transformers/msmarco/queries": "query_id:key query",
    "sentence-transformers/msmarco-bm25/triplet": "query positive negative",
    "sentence-transformers/msmarco-corpus/passage": "pid:key text",
    "sentence-transformers/msmarco-corpus/query": "qid:key text",
    "sentence-transformers/msmarco-scores-ms-marco-MiniLM-L6-v2": (
        "query_id:key corpus_id:all score:own"
    ),
    "sentence-transformers/natural-questions": "query answer",
    "sentence-transformers/parallel-sentences-talks": "english non_english",
    "sentence-transformers/quora-duplicates/pair-class": f"{_PAIR} label:2",
    "sentence-transformers/quora-duplicates/triplet": _TRIPLET,
    "sentence-transformers/quora-duplicates-mining/duplicates": "qid1:any qid2:any",
    "sentence-transformers/quora-duplicates-mining/questions": "qid:key question",
    "sentence-transformers/sentence-compression": _SIMPLE,
    "sentence-transformers/simple-wiki": _SIMPLE,
    "sentence-transformers/stackexchange-duplicates": "title1 title2",
    "sentence-transformers/stsb": f"{_PAIR} {_SCORED}",
    "sentence-transformers/wiki1m-for-simcse": "text",
    "sentence-transformers/wikipedia-en-sentences": "sentence",
    "sentence-transformers/wikipedia-sections": _TRIPLET,
    "sentence-transformers/yahoo-answers": "question answer",
    "tomaarsen/llamaindex-vdr-en-train-preprocessed": (
        f"query image {' '.join(f'negative_{n}' for n in range(16))}"
    ),
    "tomaarsen/miriad-4.4M-split": "question passage_text",
    "tomaarsen/msmarco-Qwen3-Reranker-0.6B": (
        "query positive negative_1 negative_2 negative_3 score:four"
    ),
    "vidore/syntheticDocQA_energy_train": "image_filename query image",
} | {
    f"sentence-transformers/{name}/triplet-50-ids": f"query:key positive:key {_NEGATIVES}"
    for name in (
        *("msmarco-bm25", "msmarco-msmarco-distilbert-base-tas-b"),
        *("msmarco-msmarco-distilbert-base-v3", "msmarco-msmarco-MiniLM-L6-v3"),
        *("msmarco-distilbert-margin-mse-cls-dot-v2", "msmarco-distilbert-margin-mse-cls-dot-v1"),
        *("msmarco-distilbert-margin-mse-mean-dot-v1", "msmarco-mpnet-margin-mse-mean-v1"),
        "msmarco-co-condenser-margin-mse-cls-v1",
        "msmarco-distilbert-margin-mse-mnrl-mean-v1",
        "msmarco-distilbert-margin-mse-sym-mnrl-mean-v1",
        "msmarco-distilbert-margin-mse-sym-mnrl-mean-v2",
        "msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1",
    )
}


def sentence(chance):
    return " ".join(chance.choices(WORDS, k=chance.randint(5, 14)))


def value(kind, row, chance):
    """What a column of that kind holds in a row; a number is a count of classes."""
    match kind:
        case "text":
            return sentence(chance)
        case "texts":
            return [sentence(chance) for _ in range(3)]
        case "score":
            return chance.random()
        case "key":
            return str(row)
        case "any":
            return str(chance.randrange(ROWS))
        case "keys":  # as their data set writes a list
            return str([str(chance.randrange(ROWS)) for _ in range(32)])
        case "scores":
            return str([chance.random() for _ in range(32)])
        case "all":
            return [str(other) for other in range(ROWS)]
        case "own":  # a row's own by far the highest
            return [10.0 if other == row else 5 * chance.random() for other in range(ROWS)]
        case "four":
            return [chance.random() for _ in range(4)]
        case _:
            return row % int(kind)


def table(columns, seed):
    chance = random.Random(zlib.crc32(seed.encode()))
    held = {}
    for column in columns.split():
        name, _, kind = column.partition(":")
        held[name] = [value(kind or "text", row, chance) for row in range(ROWS)]
    return Dataset.from_dict(held)


def load_dataset(name, part=None, *, split=None, streaming=False):
    """`datasets.load_dataset` of a data set named in COLUMNS."""
    columns = COLUMNS.get(f"{name}/{part}") or COLUMNS[name]
    if split is None:
        return DatasetDict({each: table(columns, f"{name} {part} {each}") for each in SPLITS})
    found = table(columns, f"{name} {part} {split}")
    return found.to_iterable_dataset() if streaming else found
