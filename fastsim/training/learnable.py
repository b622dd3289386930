"""Refuses data that a loss cannot learn from, before anything is trained."""

from collections import defaultdict

from fastsim.training.data import DataError
from fastsim.training.objectives import LOSSES


def check_learnable(loss, values, columns, layout, batch_size, *, cross=False):
    """DataError if no batch gives a loss that depends on the model.

    values: scores or labels of the rows, or None. columns: a function of a column's name that
    returns its texts. batch_size: rows of a batch.
    """
    rows = len(values) if values is not None else len(columns(layout.texts[0]))
    fewest = 2 if cross and loss == "cosent" else 1 if cross else LOSSES[loss].minimum
    if layout.negatives:
        fewest = 1
    for name, count in (("rows", rows), ("batch_size", batch_size)):
        if count < fewest:
            raise DataError(
                f"{name}: wanted at least {fewest} for {loss}, which compares the rows of a batch,"
                f" got {count}"
            )
    if loss in ("cosent", "angle") and min(values) == max(values):
        raise DataError(
            f"{layout.label}: wanted at least two different values, since {loss} learns from their"
            f" order, got {values[0]:g} in all {rows} rows"
        )
    if layout.name == "labelled texts":
        _check_labels(loss, values, columns(layout.texts[0]))
    if layout.name == "tuples" and not layout.negatives and LOSSES[loss].repeats != "ignore":
        _check_negatives(loss, [columns(name) for name in layout.texts])


def _check_labels(loss, labels, texts):
    if len(set(labels)) < 2:
        raise DataError(f"label: wanted at least two different labels for {loss}, got one")
    if not LOSSES[loss].positives:
        return
    texts_of = defaultdict(set)
    for label, text in zip(labels, texts, strict=True):
        texts_of[label].add(text)
        if len(texts_of[label]) == 2:
            return
    raise DataError(f"label: wanted a label with at least two texts for {loss}, got none")


def _check_negatives(loss, columns):
    for texts in columns:
        first = texts[0]
        if all(text == first for text in texts):
            raise DataError(
                f"{loss}: all rows have the text {first[:40]!r}, so that no row has a negative; use"
                " other texts or a column negative"
            )
