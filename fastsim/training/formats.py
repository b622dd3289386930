"""What the columns of a data file mean: the format that they make."""

import re
from dataclasses import dataclass

# Format -> its columns; the first whose columns are all there is taken.
COLUMNS = {
    "scored pairs": ("sentence1", "sentence2", "score"),
    "labelled pairs": ("sentence1", "sentence2", "label"),
    "tuples": ("anchor", "positive"),
    "labelled texts": ("text", "label"),
}
_NEGATIVE = re.compile(r"negative(_?\d+)?")
TOGETHER = "together"  # what rows of one batch share: a topic, a source, mined neighbours
DEALT = ("tuples", "labelled texts")  # the formats whose losses look at the other rows of a batch


@dataclass(frozen=True)
class Format:
    """A format by name, with the columns of this file that hold texts and the one of labels.

    together: the column whose equal values bring rows into one batch.
    """

    name: str
    texts: tuple
    label: str | None = None
    together: str | None = None

    @property
    def columns(self):
        """All columns in use."""
        return (*self.texts, *(name for name in (self.label, self.together) if name))

    @property
    def negatives(self):
        """How many columns hold negatives."""
        return len(self.texts) - 2 if self.name == "tuples" else 0


def is_role(name):
    """Whether a column of this name has a meaning here."""
    known = any(name in columns for columns in COLUMNS.values())
    return known or name == TOGETHER or bool(_NEGATIVE.fullmatch(name))


def describe():
    """The sets of columns that are understood, in one line."""
    shown = {name: ", ".join(columns) for name, columns in COLUMNS.items()}
    shown["tuples"] += "[, negative, negative_2, ...]"
    for name in DEALT:
        shown[name] += f"[, {TOGETHER}]"
    return "; ".join(f"({text})" for text in shown.values())


def format_of(columns):
    """The format of a set of column names, or ValueError naming what is understood."""
    columns = list(columns)
    for name, wanted in COLUMNS.items():
        if all(column in columns for column in wanted):
            texts = [column for column in wanted if column not in ("score", "label")]
            if name == "tuples":
                texts += [column for column in columns if _NEGATIVE.fullmatch(column)]
            label = next((column for column in wanted if column in ("score", "label")), None)
            together = TOGETHER if TOGETHER in columns else None
            if together and name not in DEALT:
                raise ValueError(f"{TOGETHER}: wanted with {' or '.join(DEALT)}, got {name}")
            return Format(name, tuple(texts), label, together)
    raise ValueError(f"columns: wanted one of {describe()}, got ({', '.join(columns)})")
