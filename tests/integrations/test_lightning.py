"""A loss in a LightningModule."""

import pytest
import torch

import fastsim
from tests.integrations.lone_peer import WIDTH, of


@pytest.mark.filterwarnings("default")  # those of its own libraries
def test_lightning(tmp_path):
    """A loss with a learnt temperature is a module of the LightningModule."""
    lightning = pytest.importorskip("pytorch_lightning", reason="it is not installed")

    class Towers(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.towers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 8) for _ in "xy")
            self.scale = torch.nn.Parameter(torch.tensor(10.0))
            self.seen = []

        def training_step(self, batch, index):
            x, y = (tower(side) for tower, side in zip(self.towers, batch, strict=True))
            loss = fastsim.info_nce(x, y, temperature=1 / self.scale)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.05)

    batches = [(of(16, WIDTH, seed=1), of(16, WIDTH, seed=2))] * 20
    model = Towers()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    assert model.seen[-1] < 0.5 * model.seen[0]
    assert model.scale != 10.0
