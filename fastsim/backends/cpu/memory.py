"""Memory for panels, their operands and gradients, in huge pages if the system has them."""

import torch

HUGE_PAGE = 2 << 20  # bytes


def empty(shape, dtype):
    """`torch.empty`; huge pages save a large tensor address lookups and page faults."""
    memory = torch.empty(shape, dtype=dtype, device="cpu")
    if memory.nbytes >= HUGE_PAGE:
        torch.ops.fastsim_cpu.huge_pages(memory)
    return memory
