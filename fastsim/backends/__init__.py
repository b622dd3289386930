"""The backends: their names, which of them can serve given tensors, and why the others cannot.

To add a backend: subclass `Backend` in a file of its own and name it in `_BACKENDS`.
"""

import contextlib
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
from fastsim.batch_metrics import in_metrics
from fastsim.environment import Variable
from fastsim.groups import process_group
from fastsim.kinds import KINDS
from fastsim.operators import transforming
from fastsim.verify.verdicts import agreed, fastest

WITH_METRICS = {*KINDS, "closest"}  # kinds whose scores `fastsim.metrics` needs

# In the order in which `auto` prefers them.
_BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (CpuBackend(), TritonBackend(), CudaBackend(), TorchBackend(), EagerBackend())
}


class _Chosen(threading.local):  # torch.compile cannot trace a ContextVar
    blocks: tuple[list[str], ...] = ()  # [name] of each open `use_backend`, the innermost last


_chosen = _Chosen()


def backends() -> dict[str, str | None]:
    """Every backend, and whether it can be used on this machine.

    Returns:
        {name: None if the backend can be used, else a sentence that says why not}.

    Example:
        >>> fastsim.backends()["eager"] is None
        True
    """
    return {name: backend.unsupported_reason() for name, backend in _BACKENDS.items()}


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls in this thread that have no `backend` argument use this backend.

    The block also affects other asyncio tasks on the same thread, so it has to end before an
    `await`.

    Args:
        name: a name in `backends()`; or "auto", which chooses for each call.

    Raises:
        ValueError: for any other name.

    Example:
        >>> with fastsim.use_backend("torch"):
        ...     fastsim.cosine_similarity(torch.eye(1))
        tensor([[1.]])
    """
    _find(name)
    block = [name]  # a list, so that `is` tells it from another block of the same name
    _chosen.blocks = (*_chosen.blocks, block)
    try:
        yield
    finally:
        _chosen.blocks = tuple(other for other in _chosen.blocks if other is not block)


_TRANSFORMED = (
    "it has no kernel for tensors inside torch.func (vmap, grad, jvp, ...) or forward-mode AD,"
    ' which backend="eager" serves'
)


_variable = Variable("FASTSIM_BACKEND")


def default_name():
    """(the name for a call without `backend`, the argument or variable that it comes from)."""
    if _chosen.blocks:
        return _chosen.blocks[-1][0], "backend"
    return _variable.value() or "auto", _variable.name


def pick(name, *tensors, kind=None, group=None, extras=()):
    """The backend for a call.

    name: None or "auto" chooses one, see below. Any other name, here, in `use_backend` or in
        FASTSIM_BACKEND, is used or refused (RuntimeError with every backend's reason), never
        replaced.
    tensors: the first decides which backends can serve the call; the others are on its device and
        are only searched for tensors of torch.func or forward-mode AD. They may be numbers, None
        or tuples.
    kind: the kind of loss or selection (fastsim/kinds).
    group: a process group whose ranks have to choose the same backend, or None.
    extras: the features (`EXTRAS`) that the loss needs.

    The choice: inside torch.func or forward-mode AD "eager", which is never chosen otherwise. On a
    device other than the CPU, the fastest backend that a verdict for this device found correct
    (fastsim/verify). Else the first backend that can serve the call.
    """
    name, argument = (name, "backend") if name else default_name()
    named = _find(name, argument)
    extras = (*extras, *extras_of_ring(group))
    transformed, with_metrics = transforming(*tensors), in_metrics()
    call = tensors[:1], kind, extras, transformed, with_metrics
    if named is not None:
        reason = _reason(named, *call)
        if reason is None:
            return named
        others = "; ".join(
            f"{other.name}: {_reason(other, *call) or 'usable'}"
            for other in _BACKENDS.values()
            if other is not named
        )
        raise RuntimeError(f"backend {name!r} cannot be used: {reason} ({others})")
    if not (transformed or with_metrics):
        verified = _verified(tensors[:1], kind, group, extras)
        if verified is not None:
            return verified
    for backend in _BACKENDS.values():
        if (transformed or backend.automatic) and _reason(backend, *call) is None:
            return backend
    reasons = (f"{b.name}: {_reason(b, *call)}" for b in _BACKENDS.values())
    raise RuntimeError(f"no backend can be used ({'; '.join(reasons)})")


def _reason(backend, tensors, kind, extras, transformed, with_metrics):
    """None if the backend can serve the call, else a sentence that says why not.

    transformed: whether a tensor is inside torch.func or forward-mode AD.
    with_metrics: whether a `fastsim.metrics` block is open.
    """
    if transformed and backend.name != "eager":
        return _TRANSFORMED
    reason = backend.unsupported_extra(extras) or backend.unsupported_reason(*tensors, kind=kind)
    if reason is None and with_metrics and not backend.records_metrics and kind in WITH_METRICS:
        return "it does not record scores for `fastsim.metrics`"
    return reason


def _verified(tensors, kind, group, extras):
    """The fastest backend that a verdict for this device found correct, or None."""
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
        choice = able and fastest(able, *place)
    else:
        choice = agreed(by_verdict, *place, process_group(group))
    return _BACKENDS[choice] if choice in able else None


def register(backend: Backend) -> None:
    """Adds a backend of another package under its name; `auto` prefers all others to it."""
    if not isinstance(backend, Backend):
        raise TypeError(f"backend: wanted a Backend, got {type(backend).__name__}")
    _BACKENDS[backend.name] = backend


def get(name):
    """The backend of that name."""
    return _BACKENDS[name]


def _find(name, argument="backend"):
    if name == "auto":
        return None
    if name not in tuple(_BACKENDS):  # a tuple, as the name may have no hash
        wanted = ", ".join(map(repr, ("auto", *_BACKENDS)))
        raise ValueError(f"{argument}: wanted one of {wanted}, got {name!r}")
    return _BACKENDS[name]


class _Package(types.ModuleType):
    """This package. Calling it calls `backends`, until public names are loaded."""

    def __call__(self):
        return backends()


sys.modules[__name__].__class__ = _Package
