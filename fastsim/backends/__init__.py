"""Which implementations there are, which can serve given tensors, and why not.

To add a backend: subclass `Backend` in a file of its own and name it in `_BACKENDS`.
"""

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterator

from fastsim.backends.base import Backend
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.cuda.backend import CudaBackend
from fastsim.backends.eager import EagerBackend
from fastsim.backends.extras import extras_of_ring
from fastsim.backends.torch.backend import TorchBackend
from fastsim.backends.triton.backend import TritonBackend
from fastsim.batch_metrics import watched
from fastsim.groups import process_group
from fastsim.kinds import KINDS
from fastsim.operators import transforming
from fastsim.verify.verdicts import agreed, fastest

OBSERVED = {*KINDS, "closest"}  # what `fastsim.metrics` looks at

# In the order of preference of `auto`.
_BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (CpuBackend(), TritonBackend(), CudaBackend(), TorchBackend(), EagerBackend())
}


class _Chosen(threading.local):  # torch.compile cannot trace a ContextVar
    blocks: tuple[list[str], ...] = ()  # of `use_backend`, the last to begin last: [name] each


_chosen = _Chosen()


def backends() -> dict[str, str | None]:
    """Every backend, and why those that cannot be used on this machine cannot.

    Returns:
        {name: None where it is usable, else a sentence that says why not}.

    Example:
        >>> fastsim.backends()["eager"] is None
        True
    """
    return {name: backend.unsupported_reason() for name, backend in _BACKENDS.items()}


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls of this thread without a `backend` argument use this one.

    Where tasks of asyncio take turns on a thread, the block has to end before an `await`: it holds
    for the other tasks too.

    Args:
        name: a name in `backends()`; or "auto", which chooses for each call.

    Raises:
        ValueError: for a name that is none of these.

    Example:
        >>> with fastsim.use_backend("torch"):
        ...     fastsim.cosine_similarity(torch.eye(1))
        tensor([[1.]])
    """
    _find(name)
    block = [name]  # a list, which no other block's is
    _chosen.blocks = (*_chosen.blocks, block)
    try:
        yield
    finally:
        _chosen.blocks = tuple(other for other in _chosen.blocks if other is not block)


_TRANSFORMED = (
    "it has no kernel for tensors inside torch.func (vmap, grad, jvp, ...) or forward-mode AD,"
    ' which backend="eager" serves'
)


def default_name():
    """(the name that a call without a backend asks for, what said so)."""
    if _chosen.blocks:
        return _chosen.blocks[-1][0], "backend"
    return os.environ.get("FASTSIM_BACKEND") or "auto", "FASTSIM_BACKEND"


def pick(name, *tensors, kind=None, group=None, extras=()):
    """The backend for these tensors, and for that kind of loss or selection (see fastsim/kinds).

    The first tensor is served, on whose device the others are; these are what else the call is
    given that torch.func or forward-mode AD may have a hold of: numbers, None and tuples among
    them.

    A name given here, by `use_backend` or by FASTSIM_BACKEND is used or refused with every
    backend's own reason (RuntimeError), never replaced. None or "auto" takes, off the CPU, the
    fastest kernels that a verdict of the device calls right (fastsim/verify), else the first
    that gives no reason against the call; inside torch.func or forward-mode AD, "eager", which is
    never taken otherwise. group: a process group, or None, whose ranks agree on these kernels.
    extras: what of `EXTRAS` the loss needs.
    """
    name, argument = (name, "backend") if name else default_name()
    named = _find(name, argument)
    extras = (*extras, *extras_of_ring(group))
    asked = tensors[:1], kind, extras, transforming(*tensors), watched()
    if named is not None:
        reason = _reason(named, *asked)
        if reason is None:
            return named
        others = "; ".join(
            f"{other.name}: {_reason(other, *asked) or 'usable'}"
            for other in _BACKENDS.values()
            if other is not named
        )
        raise RuntimeError(f"backend {name!r} cannot be used: {reason} ({others})")
    *_, dense, observed = asked
    if not (dense or observed):
        verified = _verified(tensors[:1], kind, group, extras)
        if verified is not None:
            return verified
    for backend in _BACKENDS.values():
        if (dense or backend.automatic) and _reason(backend, *asked) is None:
            return backend
    reasons = (f"{b.name}: {_reason(b, *asked)}" for b in _BACKENDS.values())
    raise RuntimeError(f"no backend can be used ({'; '.join(reasons)})")


def _reason(backend, tensors, kind, extras, dense, observed):
    if dense and backend.name != "eager":
        return _TRANSFORMED
    reason = backend.unsupported_extra(extras) or backend.unsupported_reason(*tensors, kind=kind)
    if reason is None and observed and not backend.observes and kind in OBSERVED:
        return "it does not look at scores for fastsim.metrics"
    return reason


def _verified(tensors, kind, group, extras):
    """The fastest backend that a verdict of this device calls right for the call, or None."""
    if not tensors or kind is None or tensors[0].device.type == "cpu":
        return None
    place = kind, tensors[0].dtype, tensors[0].device
    by_verdict = [
        name
        for name, backend in _BACKENDS.items()
        if backend.by_verdict and backend.unsupported_extra(extras) is None
    ]
    able = [n for n in by_verdict if _BACKENDS[n].unsupported_reason(*tensors, kind=kind) is None]
    if group is None or not by_verdict:
        found = able and fastest(able, *place)
    else:
        found = agreed(by_verdict, *place, process_group(group))
    return _BACKENDS[found] if found in able else None


def register(backend: Backend) -> None:
    """Makes a backend from elsewhere known under its name; `auto` takes it after all others."""
    if not isinstance(backend, Backend):
        raise TypeError(f"backend: wanted a Backend, got {type(backend).__name__}")
    _BACKENDS[backend.name] = backend


def get(name):
    """The backend of that name."""
    return _BACKENDS[name]


def _find(name, argument="backend"):
    if name == "auto":
        return None
    if name not in tuple(_BACKENDS):  # what has no hash is none of them either
        wanted = ", ".join(map(repr, ("auto", *_BACKENDS)))
        raise ValueError(f"{argument}: wanted one of {wanted}, got {name!r}")
    return _BACKENDS[name]


class _Package(types.ModuleType):
    """This package. It stands for the public function of its name until public names are loaded."""

    def __call__(self):
        return backends()


sys.modules[__name__].__class__ = _Package
