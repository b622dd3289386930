"""Rows of a data set as a batch."""

import torch

from fastsim.grad_cache import MicroBatches


class Collator:
    """Turns rows of a data set into the arguments of `BiEncoderModel` or `CrossEncoderModel`.

    micro_batch_size: splits each text column into `MicroBatches` of this size; None: one batch. The
    `links` of rows become the ids of `exclude`, which mark candidates that are no negatives. A row
    with `stands_in` belongs to another process: it is encoded, but `rows` is 0, so that the loss
    gets no row.
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
            row_ids, *negative_ids = torch.tensor(links).T
            batch["exclude"] = row_ids.clone(), torch.cat([row_ids, *negative_ids])
        if self.layout.label is not None:
            batch["labels"] = torch.tensor([row[self.layout.label] for row in rows])
        return _without_rows(batch) if "stands_in" in rows[0] else batch

    def _tokenize(self, texts, prompt):
        if self.micro_batch_size is None:
            return self.encoder.tokenize(texts, prompt)
        # Each micro-batch is padded only to its own longest text.
        parts = MicroBatches.of(texts, self.micro_batch_size)
        return MicroBatches(self.encoder.tokenize(part, prompt) for part in parts)


def _without_rows(batch):
    """The batch with `rows` 0: its rows are encoded, but the loss gets none of them."""
    if "labels" in batch:
        batch["labels"] = batch["labels"][:0]
    if "exclude" in batch:
        batch["exclude"] = tuple(ids[:0] for ids in batch["exclude"])
    return batch | {"rows": 0}
