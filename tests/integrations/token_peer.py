"""Tokens with masks, and comparisons with a peer's late interaction."""

import torch

QUERIES, DOCUMENTS, TOKENS, WIDTH = 6, 3, (4, 7), 10


def texts(*shape, generator=None):
    """Unit tokens and a mask that leaves each text one."""
    values = torch.nn.functional.normalize(torch.randn(*shape, WIDTH), dim=-1)
    mask = torch.rand(*shape) < 0.7
    mask[..., 1] = True
    return values, mask


def differentiated(call, *sides):
    leaves = [side.clone().requires_grad_() for side in sides]
    value = call(*leaves)
    weights = torch.linspace(-1, 2, value.numel()).reshape(value.shape)
    (value * weights).sum().backward()  # which hooks of cached losses need
    return value.detach(), [leaf.grad for leaf in leaves]


def compare(ours, theirs, *sides):
    torch.testing.assert_close(differentiated(ours, *sides), differentiated(theirs, *sides))


class Given(torch.nn.Module):
    """Stands in for an encoder: the features hold the embeddings of the tokens."""

    def forward(self, features, task=None, **_):
        return {
            "token_embeddings": features["embeddings"],
            "attention_mask": features["attention_mask"],
        }
