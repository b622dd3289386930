"""The batch sampler for a format and a loss: which rows of a data set form a batch."""

import numpy as np

from fastsim.training.batches import UniqueBatches
from fastsim.training.formats import IN_BATCH
from fastsim.training.links import LinkedBatches
from fastsim.training.objectives import LOSSES

_PART = 100_000  # rows whose texts are hashed at a time


def batch_plan(dataset, layout, loss, batch_size, *, seed=0):
    """A batch sampler; None for a format whose rows may be in any batch.

    A loss with the option `exclude` gets full batches with the links of `LinkedBatches`. A loss
    without it gets batches that hold no text twice. A loss that uses no other row gets any rows.
    """
    if layout.name not in IN_BATCH:
        return None
    names = {"groups": layout.label, "topics": layout.together}
    columns = {key: dataset[name][:] for key, name in names.items() if name}
    repeats = LOSSES[loss].repeats if layout.name == "tuples" else "share"
    if repeats == "ignore":
        numbers = np.arange(len(dataset))[:, None]
    else:
        numbers = text_numbers(dataset, layout.texts)
    batches = UniqueBatches(numbers, batch_size, seed=seed, share=repeats != "apart", **columns)
    return LinkedBatches(batches, numbers) if repeats == "exclude" else batches


def small_batches(batches, loss):
    """A note if batches hold fewer rows than their batch size, or None."""
    count = batches.small_count() if isinstance(batches, UniqueBatches) else 0
    if not count:
        return None
    return (
        f"{count} of {len(batches)} batches hold fewer than {batches.batch_size} rows: one text is"
        f" in {batches.max_uses} rows, and {loss} uses the texts of other rows as negatives;"
        " info_nce and full_triplet exclude equal texts instead"
    )


def text_numbers(dataset, names):
    """(N, T) 64-bit hashes of the texts in these columns: equal texts have equal numbers."""
    import pandas

    numbers = np.empty((len(dataset), len(names)), dtype=np.int64)
    for start in range(0, len(dataset), _PART):
        stop = min(start + _PART, len(dataset))
        part = dataset[start:stop]
        for column, name in enumerate(names):
            texts = np.array(part[name], dtype=object)
            numbers[start:stop, column] = pandas.util.hash_array(texts, categorize=False).view(
                np.int64
            )
    return numbers
