"""A LightningModule with the symmetric loss; a temperature of its own is learnt with it."""

import sys

import pytorch_lightning
import torch

from fastsim import Encoder
from fastsim.losses import InfoNCE
from fastsim.training.demo import situations


class Contrastive(pytorch_lightning.LightningModule):
    """An encoder and its loss, whose parameters are the module's."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        temperature = torch.nn.Parameter(torch.tensor(0.05))
        self.loss = InfoNCE(temperature=temperature, symmetric=True)
        self.seen = []

    def training_step(self, batch, _):
        first, second = (self.encoder(features) for features in batch)
        loss = self.loss(first, second)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30):
    """The losses of the steps."""
    encoder = Encoder.from_pretrained(model).train()  # Lightning leaves the mode as it is
    rows, _ = situations()  # your own pairs of texts here
    pairs = [(row[0], row[1]) for row in rows]

    def collate(batch):
        return [encoder.tokenize(texts) for texts in zip(*batch, strict=True)]

    loader = torch.utils.data.DataLoader(pairs, batch_size=32, shuffle=True, collate_fn=collate)
    trainer = pytorch_lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Contrastive(encoder)
    trainer.fit(module, loader)
    return module.seen


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
