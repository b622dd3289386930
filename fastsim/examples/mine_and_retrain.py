"""Hard negatives from the model's own mistakes: encode, mine, train, and again."""

import sys

import torch

import fastsim
from fastsim.training.demo import situations


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30, rounds=2):
    """The losses of the steps."""
    encoder = fastsim.Encoder.from_pretrained(model)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-4)
    rows, _ = situations()  # your own queries and corpus here; query i belongs to text i
    queries, corpus = (
        [row[0] for row in rows],
        [text for row in zip(*rows, strict=True) for text in row],
    )
    corpus = corpus[len(rows) :]  # the positives of all queries first, then all other texts
    encoder.train()  # with dropout, which `encode` leaves out
    seen = []
    for _ in range(rounds):
        negatives, _ = fastsim.mine_hard_negatives(
            encoder.encode(queries), encoder.encode(corpus), ranks=(1, 5), sample=True
        )
        for _ in range(steps // rounds):
            batch = torch.randperm(len(queries))[:16]
            texts = [queries[i] for i in batch]
            candidates = [corpus[i] for i in batch] + [corpus[negatives[i, 0]] for i in batch]
            loss = fastsim.info_nce(
                encoder(encoder.tokenize(texts)), encoder(encoder.tokenize(candidates))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
