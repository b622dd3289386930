"""The demo: what an encoder learns from a few sentences that it finds hard.

`demo_sentences.tsv` holds kinds of statement, each with four things it can be about: a sentence,
one of the same meaning in other words, and two of the opposite meaning in nearly the same words.
An encoder that goes by the words takes the opposites for paraphrases. It is trained on three
things of each kind and measured on the fourth.
"""

import csv
import itertools
import json
import tempfile
import time
from pathlib import Path

from fastsim.training.load import load_encoder, search_texts
from fastsim.training.run import Options, train

SENTENCES = Path(__file__).with_name("demo_sentences.tsv")
SAME, OPPOSITE, UNRELATED = 1.0, 0.25, 0.0


def situations():
    """(for training, held out): lists of (sentence, same, opposite, opposite too)."""
    kept, held = ([], [], []), []
    with open(SENTENCES, encoding="utf-8", newline="") as handle:
        reader = csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(reader)
        for things, *sentences in reader:
            *seen, unseen = things.split(";")
            for group, thing in zip(kept, seen, strict=True):
                group.append([text.format(thing) for text in sentences])
            held.append([text.format(unseen) for text in sentences])
    return [row for group in kept for row in group], held  # neighbours are of different kinds


def pairs(rows, *, unrelated=True):
    """(sentence1, sentence2, score) of situations: same 1, opposite 0.25.

    unrelated: with pairs of a situation and the next one too, score 0, which every encoder tells
    apart; so they belong into the training, lest it forgets, and not into the measurement.
    """
    found = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        one, same, opposite, too = row
        found += [(one, same, SAME), (opposite, too, SAME)]
        found += [(a, b, OPPOSITE) for a, b in itertools.product((one, same), (opposite, too))]
        if unrelated:
            found += [(a, b, UNRELATED) for a, b in zip(row, other, strict=True)]
    return found


def write_pairs(rows, path, *, unrelated=True):
    """`pairs` as JSON lines; the path."""
    found = pairs(rows, unrelated=unrelated)
    names = ("sentence1", "sentence2", "score")
    lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in found]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(model, output, *, seed=0, epochs=2, progress=True, cpu=False, say=print):
    """Train on the demo's sentences and search with the model before and after.

    Returns (the result of `train`, {"before" | "after": search answers}, seconds in all).
    """
    start = time.perf_counter()
    kept, held = situations()
    texts = list(dict.fromkeys(text for row in held for text in row))
    query = held[0][1]
    count = len(pairs(held, unrelated=False))
    say(f"training on {len(pairs(kept))} pairs, measuring on {count} others")
    answers = {"before": _search(load_encoder(model, cpu=cpu), query, texts)}
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            Options(
                model=model,
                train=write_pairs(kept, Path(folder) / "train.jsonl"),
                eval=write_pairs(held, Path(folder) / "held.jsonl", unrelated=False),
                loss="cosent",
                output=output,
                epochs=epochs,
                learning_rate=2e-4,
                seed=seed,
                max_length=32,
                checkpoints=str(Path(folder) / "checkpoints"),
                progress=progress,
                cpu=cpu,
            )
        )
    answers["after"] = _search(load_encoder(output, cpu=cpu), query, texts)
    return result, answers, time.perf_counter() - start


def _search(encoder, query, texts):
    """The four texts closest to a query that is one of them, itself left out."""
    return search_texts(encoder, [query], [text for text in texts if text != query], 4)
