"""The formats of data: the columns of a file and their meaning."""

import re
from dataclasses import dataclass

# Format -> its columns. A file has the first format whose columns it has.
COLUMNS = {
    "scored pairs": ("sentence1", "sentence2", "score"),
    "labelled pairs": ("sentence1", "sentence2", "label"),
    "tuples": ("anchor", "positive"),
    "labelled texts": ("text", "label"),
}
_NEGATIVE = re.compile(r"negative(_?\d+)?")
TOGETHER = "together"  # the column with equal values for rows of one batch, such as a topic
IN_BATCH = ("tuples", "labelled texts")  # the formats whose losses use the other rows of a batch


@dataclass(frozen=True)
class Format:
    """The format of a file: its name, the columns of texts, and those of labels and batches.

    together: the column whose equal values put rows into one batch.
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
        """The number of columns with negatives."""
        return len(self.texts) - 2 if self.name == "tuples" else 0


def is_role(name):
    """Whether columns of this name have a meaning in some format."""
    known = any(name in columns for columns in COLUMNS.values())
    return known or name == TOGETHER or bool(_NEGATIVE.fullmatch(name))


def describe():
    """The columns of each format, in one line."""
    shown = {name: ", ".join(columns) for name, columns in COLUMNS.items()}
    shown["tuples"] += "[, negative, negative_2, ...]"
    for name in IN_BATCH:
        shown[name] += f"[, {TOGETHER}]"
    return "; ".join(f"({text})" for text in shown.values())


def format_of(columns):
    """The format of a set of column names; ValueError that lists the formats if there is none."""
    columns = list(columns)
    for name, wanted in COLUMNS.items():
        if all(column in columns for column in wanted):
            texts = [column for column in wanted if column not in ("score", "label")]
            if name == "tuples":
                texts += [column for column in columns if _NEGATIVE.fullmatch(column)]
            label = next((column for column in wanted if column in ("score", "label")), None)
            together = TOGETHER if TOGETHER in columns else None
            if together and name not in IN_BATCH:
                raise ValueError(f"{TOGETHER}: needs {' or '.join(IN_BATCH)}, got {name}")
            return Format(name, tuple(texts), label, together)
    raise ValueError(f"columns: wanted one of {describe()}, got ({', '.join(columns)})")
