"""Canary bytes around every tensor that is made within a block: a write outside one shows."""

import contextlib

import torch

GUARD, BYTE = 256, 0xA5  # bytes on either side, which keep the alignment of what lies between


@contextlib.contextmanager
def canaries():
    """Yields a function that says how many tensors made in the block were written around."""
    made = []

    def padded(shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((size + 2 * GUARD,), BYTE, dtype=torch.uint8, device=device)
        made.append((memory, size))
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    def new_empty(self, *shape, dtype=None, device=None, **others):
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        return padded(shape, dtype or self.dtype, device or self.device)

    def empty_like(like, *, dtype=None, device=None, **others):
        return padded(like.shape, dtype or like.dtype, device or like.device)

    def broken():
        sides = ((memory[:GUARD], memory[GUARD + size :]) for memory, size in made)
        return sum(bool((torch.cat(pair) != BYTE).any()) for pair in sides)

    kept = torch.Tensor.new_empty, torch.empty_like
    torch.Tensor.new_empty, torch.empty_like = new_empty, empty_like
    try:
        yield broken
    finally:
        torch.Tensor.new_empty, torch.empty_like = kept
