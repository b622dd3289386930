"""A recommender of two towers: dot products, and popular items corrected for (logQ).

An item is a negative of others as often as it is in the batch, so frequent items are pushed down
too often. Minus the logarithm of that frequency, added to an item's logits, makes up for it
(Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations").
"""

import torch

import fastsim


def main(steps=200):
    """The losses of the steps."""
    torch.manual_seed(0)
    users, items = torch.nn.Embedding(1000, 32), torch.nn.Embedding(200, 32)
    optimizer = torch.optim.AdamW([*users.parameters(), *items.parameters()], lr=1e-2)
    # Your own clicks here: (user, item), items with frequencies that fall like 1 / rank.
    frequencies = 1 / torch.arange(1, 201)
    frequencies = frequencies / frequencies.sum()
    clicks = torch.stack(
        [torch.arange(1000).repeat(20), torch.multinomial(frequencies, 20_000, replacement=True)]
    ).T
    seen = []
    for _ in range(steps):
        user, item = clicks[torch.randint(len(clicks), (256,))].T
        loss = fastsim.info_nce(
            users(user),
            items(item),
            similarity="dot",
            temperature=1.0,
            candidate_bias=-frequencies[item].log(),
            exclude=(item, item),  # the same item twice is no negative of itself
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


if __name__ == "__main__":
    print(main())
