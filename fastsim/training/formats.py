"""What the columns of a data file mean, and which losses can be trained on them."""

import re
from dataclasses import dataclass

# Format -> its columns; the first whose columns are all there is taken.
COLUMNS = {
    "scored pairs": ("sentence1", "sentence2", "score"),
    "labelled pairs": ("sentence1", "sentence2", "label"),
    "tuples": ("anchor", "positive"),
    "labelled texts": ("text", "label"),
}
_NEGATIVE = re.compile(r"negative(_\d+)?")


@dataclass(frozen=True)
class Format:
    """A format by name, with the columns of this file that hold texts and the one of labels."""

    name: str
    texts: tuple
    label: str | None = None

    @property
    def columns(self):
        """All columns in use."""
        return self.texts if self.label is None else (*self.texts, self.label)

    @property
    def negatives(self):
        """How many columns hold negatives."""
        return len(self.texts) - 2 if self.name == "tuples" else 0


def is_role(name):
    """Whether a column of this name has a meaning here."""
    return any(name in columns for columns in COLUMNS.values()) or bool(_NEGATIVE.fullmatch(name))


def describe():
    """The sets of columns that are understood, in one line."""
    shown = [", ".join(columns) for columns in COLUMNS.values()]
    shown[2] += "[, negative, negative_2, ...]"
    return "; ".join(f"({text})" for text in shown)


def format_of(columns):
    """The format of a set of column names, or ValueError naming what is understood."""
    columns = list(columns)
    for name, wanted in COLUMNS.items():
        if all(column in columns for column in wanted):
            texts = [column for column in wanted if column not in ("score", "label")]
            if name == "tuples":
                texts += [column for column in columns if _NEGATIVE.fullmatch(column)]
            label = next((column for column in wanted if column in ("score", "label")), None)
            return Format(name, tuple(texts), label)
    raise ValueError(f"columns: wanted one of {describe()}, got ({', '.join(columns)})")
