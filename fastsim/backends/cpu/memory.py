"""Memory for what panels are multiplied with: in huge pages, where the system has them."""

import torch

HUGE_PAGE = 2 << 20  # bytes


def empty(shape, dtype):
    """`torch.empty`; large memory in huge pages, which are found faster and cleared at once."""
    memory = torch.empty(shape, dtype=dtype, device="cpu")
    if memory.nbytes >= HUGE_PAGE:
        torch.ops.fastsim_cpu.huge_pages(memory)
    return memory
