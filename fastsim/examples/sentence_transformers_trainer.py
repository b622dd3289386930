"""The trainer of sentence-transformers with a drop-in loss: one import is another."""

import sys
import tempfile

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

# was: from sentence_transformers.sentence_transformer import losses
from fastsim.integrations import sentence_transformers as losses
from fastsim.training.demo import situations


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30):
    """The losses of the steps."""
    encoder = SentenceTransformer(model, device="cpu")
    rows, _ = situations()  # your own rows here: anchor, positive, hard negative
    data = Dataset.from_dict(
        {
            "anchor": [row[0] for row in rows],
            "positive": [row[1] for row in rows],
            "negative": [row[2] for row in rows],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = SentenceTransformerTrainer(
            encoder, arguments, data, loss=losses.MultipleNegativesRankingLoss(encoder)
        )
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
