"""When the processes of a wrapped encoder reduce their gradients: once a step.

Three families of wrappers, known by their methods:

    no_sync()                                  DistributedDataParallel and its kin
    set_requires_gradient_sync(bool)           FSDP2 (`torch.distributed.fsdp.fully_shard`)
    set_gradient_accumulation_boundary(bool)   DeepSpeed, whose engine also runs the backward pass

FSDP2 gathers parameters too, and DistributedDataParallel sends the first process's buffers to all.
They do so before an encoder is called, not within: where the encoder fails on one process, no other
waits for it in a gathering.
"""

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist

from fastsim.dtensor import is_dtensor

_METHODS = ("set_gradient_accumulation_boundary", "set_requires_gradient_sync", "no_sync")


def wrappers_of(encode, module=None):
    """The outermost wrappers in an encoder that reduce gradients: [] where nothing does.

    encode: a module, or a function around one, which is looked for in what the function closes
    over; module: the module itself, where the function hides it.
    """
    found = []
    for candidate in _modules(encode if module is None else module):
        for inner in _inner(candidate):  # the outer before the inner
            if _reduces(inner) and not _within(inner, found):
                found.append(inner)
    return found


def _modules(function):
    """The modules that a function is, belongs to, or closes over."""
    if isinstance(function, torch.nn.Module) or _reduces(function):
        return [function]
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [module for part in parts for module in _modules(part)]
    found = []
    if isinstance(getattr(function, "__self__", None), torch.nn.Module):
        found.append(function.__self__)
    held = getattr(function, "__dict__", {}).values()  # of an object that is called
    found += [value for value in held if isinstance(value, torch.nn.Module)]
    if inspect.isfunction(function):
        seen = inspect.getclosurevars(function)
        values = [*seen.nonlocals.values(), *seen.globals.values()]
        found += [value for value in values if isinstance(value, torch.nn.Module)]
    return found


def _inner(module):
    return list(module.modules()) if isinstance(module, torch.nn.Module) else [module]


def _reduces(module):
    return any(callable(getattr(module, name, None)) for name in _METHODS)


def _within(module, wrappers):
    return any(module is inner for wrapper in wrappers for inner in _inner(wrapper))


def process_group_of(wrappers):
    """The process group that the wrappers reduce over, or None where there is one process."""
    if not wrappers or not dist.is_available() or not dist.is_initialized():
        return None
    group = _group_of(wrappers[0])
    return group if dist.get_world_size(group) > 1 else None


def _group_of(wrapper):
    """That of DistributedDataParallel, of DeepSpeed's engine, or of FSDP2's mesh; else all ranks.

    Of a mesh of several dimensions too, whose ranks all take the step.
    """
    for name in ("process_group", "data_parallel_group"):
        group = getattr(wrapper, name, None)
        if isinstance(group, dist.ProcessGroup):
            return group
    parameters = getattr(wrapper, "parameters", list)()
    mesh = next((p.device_mesh for p in parameters if is_dtensor(p)), None)
    return dist.group.WORLD if mesh is None or mesh.ndim > 1 else mesh.get_group()


def device_of(wrappers):
    """The device of the wrappers' parameters."""
    parameters = (p for w in wrappers for p in getattr(w, "parameters", list)())
    return next((p.device for p in parameters), torch.device("cpu"))


def shards_parameters(wrappers):
    """Whether the processes hold shards of the parameters that `unshard` makes whole."""
    return any(_sharded(wrappers))


def unshard(wrappers):
    """Make the parameters of FSDP2's modules whole, on all processes at once."""
    for module in _sharded(wrappers):
        module.unshard()


def send_buffers(wrappers):
    """Let all processes have the buffers of the first at once, for all micro-batches of a step.

    DistributedDataParallel would do it in the first call, and then not before its next reduction.
    """
    for wrapper in wrappers:
        if hasattr(wrapper, "will_sync_module_buffers"):
            wrapper.require_forward_param_sync = True
            if wrapper.will_sync_module_buffers():
                wrapper._sync_buffers()
            wrapper.require_forward_param_sync = False


def reshard_after_error(wrappers):
    """After an error: nothing is gathered any more, and the modules can be called again."""
    for wrapper in wrappers:
        if hasattr(wrapper, "reset_iter_state"):  # of newer versions of torch
            wrapper.reset_iter_state()
        if hasattr(wrapper, "will_sync_module_buffers"):  # alike on all processes
            wrapper.require_forward_param_sync = True
    for module in _sharded(wrappers):
        module.reshard()


def _sharded(wrappers):
    for wrapper in wrappers:
        if hasattr(wrapper, "set_requires_gradient_sync"):
            yield from (module for module in _inner(wrapper) if hasattr(module, "unshard"))


@contextlib.contextmanager
def accumulating(wrappers):
    """Around the backward passes of a step; DeepSpeed's engines are left as they were.

    Yields, per wrapper, whether the step reduces at its end: not within `no_sync`, nor within an
    accumulation over several steps.
    """
    engines = [wrapper for wrapper in wrappers if _is_engine(wrapper)]
    ends = [not _is_engine(w) or _at_boundary(w) for w in wrappers]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            # After an error too: its next steps would otherwise be within an accumulation for ever.
            stack.callback(_set_boundary, engine, getattr(engine, _BOUNDARY, None))
        for engine in engines:
            stack.enter_context(_one_reduction(engine))
        yield ends


_BOUNDARY = "_is_gradient_accumulation_boundary"


def _is_engine(wrapper):
    return hasattr(wrapper, "set_gradient_accumulation_boundary")


def _set_boundary(engine, boundary):
    if hasattr(engine, _BOUNDARY):  # None: the engine counts the steps itself
        setattr(engine, _BOUNDARY, boundary)


def _at_boundary(engine):
    ask = getattr(engine, "is_gradient_accumulation_boundary", None)
    return True if ask is None else ask()


@contextlib.contextmanager
def _one_reduction(engine):
    """ZeRO-2 and 3 reduce in every backward pass, but for those within this block."""
    several = getattr(engine, "gradient_accumulation_steps", lambda: 1)() > 1
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    coalesce = getattr(engine, "coalesce_grad_reduction", None)
    with contextlib.ExitStack() as stack:
        if stage >= 2 and not several and coalesce is not None:
            with contextlib.suppress(NotImplementedError):  # with this optimizer
                stack.enter_context(coalesce())
        yield


@contextlib.contextmanager
def reducing(wrappers, last):
    """A backward pass after which gradients are reduced over the processes, or not yet.

    last: by wrapper, whether it runs no more in this step.
    """
    with contextlib.ExitStack() as stack:
        for wrapper, now in zip(wrappers, last, strict=True):
            if _is_engine(wrapper):
                wrapper.set_gradient_accumulation_boundary(now)
            elif hasattr(wrapper, "set_requires_gradient_sync"):
                _set_fsdp(wrapper, now)
                # Another step, without GradCache perhaps, finds what it expects.
                stack.callback(_set_fsdp, wrapper, True)
            elif not now:
                stack.enter_context(wrapper.no_sync())
        yield


def _set_fsdp(wrapper, now):
    wrapper.set_requires_gradient_sync(now)
    wrapper.set_is_last_backward(now)
    # Parameters that are gathered stay so until the next micro-batch has used them.
    wrapper.set_reshard_after_backward(now)


def run_backward(wrappers, roots, gradients):
    """The backward pass; DeepSpeed's engine runs its own."""
    engines = [w for w in wrappers if _is_engine(w)]
    if not engines:
        torch.autograd.backward(roots, gradients)
        return
    pairs = zip(roots, gradients, strict=True)
    products = sum((root.float() * grad.float()).sum() for root, grad in pairs)
    engines[0].backward(products, scale_wrt_gas=False)
