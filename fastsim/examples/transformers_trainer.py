"""The Trainer of transformers with a model of your own: it returns the loss from `forward`."""

import sys
import tempfile

import torch
import transformers

import fastsim
from fastsim.training.demo import situations


class TwoTexts(torch.nn.Module):
    """One BERT for both texts of a pair, InfoNCE with a learnt temperature."""

    def __init__(self, model):
        super().__init__()
        self.bert = transformers.AutoModel.from_pretrained(model)
        self.log_scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, first, second):
        loss = fastsim.info_nce(
            self.embed(first), self.embed(second), temperature=(-self.log_scale).exp()
        )
        return {"loss": loss}

    def embed(self, texts):
        """Mean of the token states: (N, D)."""
        states = self.bert(**texts).last_hidden_state
        mask = texts["attention_mask"].unsqueeze(-1)
        return (states * mask).sum(1) / mask.sum(1)


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30):
    """The losses of the steps."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows, _ = situations()  # your own pairs of texts here
    pairs = [{"first": row[0], "second": row[1]} for row in rows]

    def collate(batch):
        return {
            name: dict(tokenizer([p[name] for p in batch], padding=True, return_tensors="pt"))
            for name in ("first", "second")
        }

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            use_cpu=True,
        )
        trainer = transformers.Trainer(TwoTexts(model), arguments, collate, pairs)
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
