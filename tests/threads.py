"""The same bits with any number of threads.

More threads than cores take turns: those that wait have their work taken over by others.
"""

import torch


def assert_same_bits(results, counts):
    """results() -> tensors, which are to be the same with each of these numbers of threads."""
    before, found = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(results())
    finally:
        torch.set_num_threads(before)
    for count, tensors in zip(counts, found, strict=True):
        pairs = zip(found[0], tensors, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), f"{count} threads"
