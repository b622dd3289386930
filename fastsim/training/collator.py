"""Rows of a data set as a batch."""

import torch

from fastsim.grad_cache import MicroBatches


class Collator:
    """Rows of a data set as the arguments of `BiEncoderModel` or `CrossEncoderModel`.

    micro_batch_size: each text column as `MicroBatches`. Rows with `links` say which candidates are
    no negatives: the ids of `exclude`. A row that `stands_in` is one of another process: it is
    encoded, and `rows` says that the loss gets none.
    """

    def __init__(self, encoder, layout, *, cross=False, micro_batch_size=None):
        self.encoder, self.layout, self.cross = encoder, layout, cross
        self.micro_batch_size = micro_batch_size

    def __call__(self, rows):
        columns = [[row[name] for row in rows] for name in self.layout.texts]
        if self.cross:
            batch = {"features": self.encoder.tokenize(*columns)}
        else:
            prompts = map(self.encoder.prompt_of_column, self.layout.texts)
            parts = zip(columns, prompts, strict=True)
            batch = {"features": [self._tokenize(column, prompt) for column, prompt in parts]}
        links = [row["links"] for row in rows if row.get("links")]
        if links:
            rows_own, *negatives = torch.tensor(links).T
            batch["exclude"] = rows_own.clone(), torch.cat([rows_own, *negatives])
        if self.layout.label is not None:
            batch["labels"] = torch.tensor([row[self.layout.label] for row in rows])
        return _of_no_rows(batch) if "stands_in" in rows[0] else batch

    def _tokenize(self, texts, prompt):
        if self.micro_batch_size is None:
            return self.encoder.tokenize(texts, prompt)
        # Each padded to its own longest text.
        parts = MicroBatches.of(texts, self.micro_batch_size)
        return MicroBatches(self.encoder.tokenize(part, prompt) for part in parts)


def _of_no_rows(batch):
    """A batch whose rows are encoded and are none for the loss."""
    if "labels" in batch:
        batch["labels"] = batch["labels"][:0]
    if "exclude" in batch:
        batch["exclude"] = tuple(ids[:0] for ids in batch["exclude"])
    return batch | {"rows": 0}
