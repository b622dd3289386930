"""The demo: an encoder learns from a few sentences that are hard for it.

A row of `demo_sentences.tsv` has four templates and four subjects to put into them. The templates
are a sentence, a paraphrase in other words, and two sentences of the opposite meaning in nearly the
same words. An encoder that compares words takes the opposites for paraphrases. It is trained on
three subjects of each row and evaluated on the fourth.
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
    """(for training, held out): lists of (sentence, paraphrase, opposite, second opposite)."""
    training, held_out = ([], [], []), []
    with open(SENTENCES, encoding="utf-8", newline="") as handle:
        reader = csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(reader)
        for subjects, *templates in reader:
            *seen, unseen = subjects.split(";")
            for group, subject in zip(training, seen, strict=True):
                group.append([text.format(subject) for text in templates])
            held_out.append([text.format(unseen) for text in templates])
    # Neighbouring rows have different templates.
    return [row for group in training for row in group], held_out


def pairs(rows, *, unrelated=True):
    """(sentence1, sentence2, score) of situations: 1 for the same meaning, 0.25 for the opposite.

    unrelated: also pairs of a situation with the next one, with score 0. Every encoder separates
    these. The training uses them, so that the encoder still separates them afterwards; the
    evaluation does not.
    """
    scored = []
    for row, next_row in zip(rows, rows[1:] + rows[:1], strict=True):
        first, paraphrase, *opposites = row
        same = (first, paraphrase)
        scored += [(*same, SAME), (*opposites, SAME)]
        scored += [(a, b, OPPOSITE) for a, b in itertools.product(same, opposites)]
        if unrelated:
            scored += [(a, b, UNRELATED) for a, b in zip(row, next_row, strict=True)]
    return scored


def write_pairs(rows, path, *, unrelated=True):
    """Write `pairs` as JSON lines; returns the path."""
    names = ("sentence1", "sentence2", "score")
    scored = pairs(rows, unrelated=unrelated)
    lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in scored]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(model, output, *, seed=0, epochs=2, progress=True, cpu=False, say=print):
    """Train on the demo's sentences and search with the model before and after.

    Returns (the result of `train`, {"before" | "after": search answers}, total seconds).
    """
    start = time.perf_counter()
    training, held_out = situations()
    texts = list(dict.fromkeys(text for row in held_out for text in row))
    query = held_out[0][1]
    count = len(pairs(held_out, unrelated=False))
    say(f"training on {len(pairs(training))} pairs, evaluating on {count} others")
    answers = {"before": _search(load_encoder(model, cpu=cpu), query, texts)}
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            Options(
                model=model,
                train=write_pairs(training, Path(folder) / "train.jsonl"),
                eval=write_pairs(held_out, Path(folder) / "held.jsonl", unrelated=False),
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
    """The four of the texts that are most similar to a query, without the query itself."""
    return search_texts(encoder, [query], [text for text in texts if text != query], 4)
