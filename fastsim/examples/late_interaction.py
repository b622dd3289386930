"""Token vectors and MaxSim, as ColBERT trains them: a BERT, a projection, late interaction."""

import sys

import torch
import transformers

from fastsim.losses import LateInteraction
from fastsim.training.demo import situations


class TokenVectors(torch.nn.Module):
    """A vector of 128 numbers for each token, and the mask of those that are no padding."""

    def __init__(self, model):
        super().__init__()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.bert = transformers.AutoModel.from_pretrained(model)
        self.project = torch.nn.Linear(self.bert.config.hidden_size, 128, bias=False)

    def forward(self, texts):
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        return self.project(self.bert(**tokens).last_hidden_state), tokens["attention_mask"].bool()


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30):
    """The losses of the steps."""
    encoder, loss = TokenVectors(model), LateInteraction(temperature=0.05, average=True)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-4)
    rows, _ = situations()  # your own queries and documents here
    encoder.train()  # with dropout: a model that is loaded has none
    seen = []
    for _ in range(steps):
        batch = [rows[i] for i in torch.randperm(len(rows))[:32]]
        queries, query_mask = encoder([row[0] for row in batch])
        # The positives of all queries first, then a hard negative of each.
        documents, document_mask = encoder([row[k] for k in (1, 2) for row in batch])
        value = loss(queries, documents, query_mask, document_mask)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    return seen


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
