"""Which rows of a data set are trained together: a batch sampler for its format and loss."""

import numpy as np

from fastsim.training.batches import UniqueBatches
from fastsim.training.formats import DEALT
from fastsim.training.links import LinkedBatches
from fastsim.training.objectives import LOSSES

_PART = 100_000  # rows whose texts are numbered at once


def batch_plan(dataset, layout, loss, batch_size, *, seed=0):
    """A batch sampler, or None for formats whose rows may stand in any batch.

    Losses that take `exclude` get full batches and the links of `LinkedBatches`; losses without it
    get batches that hold no text twice; losses that look at no other row get any rows.
    """
    if layout.name not in DEALT:
        return None
    names = {"groups": layout.label, "topics": layout.together}
    known = {key: dataset[name][:] for key, name in names.items() if name}
    repeats = LOSSES[loss].repeats if layout.name == "tuples" else "share"
    if repeats == "ignore":
        numbers = np.arange(len(dataset))[:, None]
    else:
        numbers = text_numbers(dataset, layout.texts)
    batches = UniqueBatches(numbers, batch_size, seed=seed, share=repeats != "apart", **known)
    return LinkedBatches(batches, numbers) if repeats == "exclude" else batches


def small_batches(batches, loss):
    """A sentence on batches that are smaller than asked, or None."""
    count = batches.small() if isinstance(batches, UniqueBatches) else 0
    if not count:
        return None
    return (
        f"{count} of {len(batches)} batches hold fewer than {batches.batch_size} rows: one text is"
        f" in {batches.most} rows, and {loss} takes the texts of other rows for negatives;"
        " info_nce and full_triplet leave equal texts out instead"
    )


def text_numbers(dataset, names):
    """(N, T) integers of the texts in these columns, equal where texts are (64-bit hashes)."""
    import pandas

    found = np.empty((len(dataset), len(names)), dtype=np.int64)
    for start in range(0, len(dataset), _PART):
        stop = min(start + _PART, len(dataset))
        part = dataset[start:stop]
        for column, name in enumerate(names):
            texts = np.array(part[name], dtype=object)
            found[start:stop, column] = pandas.util.hash_array(texts, categorize=False).view(
                np.int64
            )
    return found
