"""Records the collectives of torch.distributed that are called, and can stand in for them."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch.distributed, "Backends": what both gloo and NCCL have; two names where torch 2.13 gave one.
GLOO_AND_NCCL = {
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "batch_isend_irecv",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
}
# ncclDataType_t; torch sends bool as uint8.
CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}
# Every function of torch.distributed that exchanges something, but those of objects.
NAMES = sorted(
    {
        name
        for name in dir(dist)
        for start in ("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend")
        if name.startswith((start, "irecv", "batch_isend", "barrier", "monitored"))
        and callable(getattr(dist, name))
        and "object" not in name
    }
)
_KEPT = ("isend", "irecv")  # which batch_isend_irecv is given by name


@dataclass(frozen=True)
class Call:
    """One tensor of a call: its first dimension differs between ranks in `batch_isend_irecv`."""

    name: str
    shape: tuple
    dtype: torch.dtype
    contiguous: bool
    how: str


class Done:
    """A request that is answered."""

    def wait(self):
        pass


@contextlib.contextmanager
def recording(calls, *, instead=None):
    """Appends a `Call` to `calls` for every tensor that is exchanged within.

    instead: called in place of each function, so that nothing is exchanged.
    """
    kept = {name: getattr(dist, name) for name in NAMES if name not in _KEPT}

    def recorder(name, function):
        def record(*arguments, **options):
            values = [*arguments, *options.values()]
            operations = values[0] if name == "batch_isend_irecv" else []
            how = ", ".join(str(v) for v in values if isinstance(v, dist.ReduceOp.RedOpType))
            tensors = [(value, how) for value in values if isinstance(value, torch.Tensor)]
            tensors += [(each.tensor, each.op.__name__) for each in operations]
            calls.extend(
                Call(name, tuple(t.shape), t.dtype, t.is_contiguous(), how) for t, how in tensors
            )
            return (instead or function)(*arguments, **options)

        return record

    try:
        for name, function in kept.items():
            setattr(dist, name, recorder(name, function))
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def order(calls):
    """What has to be the same on all ranks: the collectives with their shapes and types."""
    return [
        (call.name, call.dtype, call.how, () if call.name.startswith("batch") else call.shape)
        for call in calls
    ]
