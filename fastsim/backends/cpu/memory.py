"""Memory for panels, their operands and gradients, in huge pages if the system has them."""

import torch

HUGE_PAGE = 2 << 20  # bytes


def empty(shape, dtype):
    """`torch.empty`, in huge pages."""
    return in_huge_pages(torch.empty(shape, dtype=dtype, device="cpu"))


def in_huge_pages(memory):
    """A new tensor; huge pages save a large one address lookups and page faults."""
    if memory.nbytes >= HUGE_PAGE:
        torch.ops.fastsim_cpu.huge_pages(memory)
    return memory
