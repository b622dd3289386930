"""Data that a loss cannot learn from is refused before anything is trained."""

from collections import defaultdict

from fastsim.training.data import DataError
from fastsim.training.objectives import LOSSES


def check_learnable(loss, values, columns, layout, batch_size, *, cross=False):
    """DataError where every batch would give the same loss whatever the model does.

    values: scores or labels of the rows, or None; columns: a function that gives the texts of a
    column by name; batch_size: rows of a batch.
    """
    rows = len(values) if values is not None else len(columns(layout.texts[0]))
    least = 2 if cross and loss == "cosent" else 1 if cross else LOSSES[loss].minimum
    if layout.negatives:
        least = 1
    for name, count in (("rows", rows), ("batch_size", batch_size)):
        if count < least:
            raise DataError(
                f"{name}: {loss} compares rows of a batch and wants {least} or more, got {count}"
            )
    if loss in ("cosent", "angle") and min(values) == max(values):
        what = f"score {values[0]:g}" if layout.label == "score" else f"label {values[0]:g}"
        raise DataError(
            f"{layout.label}: all {rows} rows have the {what}; {loss} learns from the order of"
            " different ones"
        )
    if layout.name == "labelled texts":
        _check_labels(loss, values, columns(layout.texts[0]))
    if layout.name == "tuples" and not layout.negatives and LOSSES[loss].repeats != "ignore":
        _check_negatives(loss, [columns(name) for name in layout.texts])


def _check_labels(loss, labels, texts):
    if len(set(labels)) < 2:
        raise DataError(f"label: all rows have one label; {loss} wants texts of different labels")
    if not LOSSES[loss].positives:
        return
    of_label = defaultdict(set)
    for label, text in zip(labels, texts, strict=True):
        of_label[label].add(text)
        if len(of_label[label]) == 2:
            return
    raise DataError(f"label: every label has one text; {loss} wants labels with two texts or more")


def _check_negatives(loss, columns):
    for texts in columns:
        first = texts[0]
        if all(text == first for text in texts):
            raise DataError(
                f"{loss}: all rows have the text {first[:40]!r}, so that no row has a negative;"
                " give other texts or a column negative"
            )
