"""Reducing the gradients of a wrapped encoder over its processes only once a step.

There are three families of wrappers, recognised by their methods:

    no_sync()                                  DistributedDataParallel and its kin
    set_requires_gradient_sync(bool)           FSDP2 (`torch.distributed.fsdp.fully_shard`)
    set_gradient_accumulation_boundary(bool)   DeepSpeed, whose engine also runs the backward pass

FSDP2 also gathers parameters, and DistributedDataParallel sends the first process's buffers to all.
GradCache makes them do so before it calls an encoder, not within the call. So if the encoder fails
on one process, no other process waits for it.
"""

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist

from fastsim.dtensor import is_dtensor

_METHODS = ("set_gradient_accumulation_boundary", "set_requires_gradient_sync", "no_sync")


def wrappers_of(encode, module=None):
    """The outermost wrappers in an encoder that reduce gradients; [] without any.

    encode: a module, or a function, whose closure is searched for modules.
    module: the module itself, if the function hides it.

    Raises:
        ValueError: for DistributedDataParallel with static_graph.
    """
    wrappers = []
    for candidate in _modules(encode if module is None else module):
        for inner in _inner(candidate):  # the outer before the inner
            if _reduces(inner) and not _within(inner, wrappers):
                _check_reducing_late(inner)
                wrappers.append(inner)
    return wrappers


def _check_reducing_late(wrapper):
    """Raises a ValueError for a wrapper that cannot wait for the last micro-batch."""
    if getattr(wrapper, "static_graph", False):
        raise ValueError(
            "encode: wanted DistributedDataParallel without static_graph, whose first backward pass"
            " has to reduce gradients, got static_graph=True"
        )


def _modules(function):
    """The modules of a function: itself, its object, or those in its attributes or closure."""
    if isinstance(function, torch.nn.Module) or _reduces(function):
        return [function]
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [module for part in parts for module in _modules(part)]
    modules = []
    if isinstance(getattr(function, "__self__", None), torch.nn.Module):
        modules.append(function.__self__)
    attributes = getattr(function, "__dict__", {}).values()  # of a callable object
    modules += [value for value in attributes if isinstance(value, torch.nn.Module)]
    if inspect.isfunction(function):
        closure = inspect.getclosurevars(function)
        values = [*closure.nonlocals.values(), *closure.globals.values()]
        modules += [value for value in values if isinstance(value, torch.nn.Module)]
    return modules


def _inner(module):
    return list(module.modules()) if isinstance(module, torch.nn.Module) else [module]


def _reduces(module):
    return any(callable(getattr(module, name, None)) for name in _METHODS)


def _within(module, wrappers):
    return any(module is inner for wrapper in wrappers for inner in _inner(wrapper))


def process_group_of(wrappers):
    """The process group over which the wrappers reduce; None for one process."""
    if not wrappers or not dist.is_available() or not dist.is_initialized():
        return None
    group = _group_of(wrappers[0])
    return group if dist.get_world_size(group) > 1 else None


def _group_of(wrapper):
    """The group of DistributedDataParallel, of DeepSpeed's engine or of FSDP2's 1-d mesh.

    All ranks for anything else: all ranks of a mesh of several dimensions take the step together.
    """
    for name in ("process_group", "data_parallel_group"):
        group = getattr(wrapper, name, None)
        if isinstance(group, dist.ProcessGroup):
            return group
    mesh = next((p.device_mesh for p in _parameters(wrapper) if is_dtensor(p)), None)
    return dist.group.WORLD if mesh is None or mesh.ndim > 1 else mesh.get_group()


def device_of(wrappers):
    """The device of the wrappers' parameters."""
    return next((p.device for w in wrappers for p in _parameters(w)), torch.device("cpu"))


def shards_parameters(wrappers):
    """Whether the processes hold shards of parameters, which `unshard` gathers."""
    return any(_sharded(wrappers))


def unshard(wrappers):
    """Gathers the parameters of FSDP2's modules; all processes have to call it."""
    for module in _sharded(wrappers):
        module.unshard()


def send_buffers(wrappers):
    """Sends the buffers of the first process to all now, once for all micro-batches of a step.

    DistributedDataParallel would do it in the first call, and then not before its next reduction.
    """
    for wrapper in wrappers:
        if hasattr(wrapper, "will_sync_module_buffers"):
            wrapper.require_forward_param_sync = True
            if wrapper.will_sync_module_buffers():
                wrapper._sync_buffers()
            wrapper.require_forward_param_sync = False


def reshard_after_error(wrappers):
    """Frees gathered parameters after an error, so that the modules can be called again."""
    for wrapper in wrappers:
        if hasattr(wrapper, "reset_iter_state"):  # in newer versions of torch
            wrapper.reset_iter_state()
        if hasattr(wrapper, "will_sync_module_buffers"):  # the same on all processes
            wrapper.require_forward_param_sync = True
    for module in _sharded(wrappers):
        module.reshard()


def _sharded(wrappers):
    for wrapper in wrappers:
        if hasattr(wrapper, "set_requires_gradient_sync"):
            yield from (module for module in _inner(wrapper) if hasattr(module, "unshard"))


@contextlib.contextmanager
def accumulating(wrappers):
    """A context for all backward passes of a step; afterwards restores DeepSpeed's engines.

    Yields for each wrapper whether it reduces its gradients at the end of the step. An engine that
    accumulates gradients over several steps reduces only in the last of them.
    """
    engines = [wrapper for wrapper in wrappers if _is_engine(wrapper)]
    ends = [not _is_engine(w) or _at_boundary(w) for w in wrappers]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            # Also after an error: otherwise all later steps would count as accumulation.
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
    """A context after which ZeRO-2 and 3 reduce, instead of in every backward pass."""
    several = getattr(engine, "gradient_accumulation_steps", lambda: 1)() > 1
    stage = getattr(engine, "zero_optimization_stage", lambda: 0)()
    coalesce = getattr(engine, "coalesce_grad_reduction", None)
    with contextlib.ExitStack() as stack:
        if stage >= 2 and not several and coalesce is not None:
            with contextlib.suppress(NotImplementedError):  # some optimizers lack it
                stack.enter_context(coalesce())
        yield


@contextlib.contextmanager
def reducing(wrappers, now):
    """A context for one forward and backward pass of these wrappers.

    now: for each wrapper, whether this backward pass reduces its gradients.
    """
    with contextlib.ExitStack() as stack:
        for wrapper, reduces_now in zip(wrappers, now, strict=True):
            if _is_engine(wrapper):
                wrapper.set_gradient_accumulation_boundary(reduces_now)
            elif hasattr(wrapper, "set_requires_gradient_sync"):
                _set_fsdp(wrapper, reduces_now)
                # The default, for later steps, perhaps without GradCache.
                stack.callback(_set_fsdp, wrapper, True)
            elif not reduces_now:
                stack.enter_context(wrapper.no_sync())
        yield


def _set_fsdp(wrapper, now):
    wrapper.set_requires_gradient_sync(now)
    wrapper.set_is_last_backward(now)
    # Parameters stay gathered until the last micro-batch has used them.
    wrapper.set_reshard_after_backward(now)


def run_backward(wrappers, roots, gradients):
    """Runs the backward pass, through DeepSpeed's engine if there is one."""
    engines = [w for w in wrappers if _is_engine(w)]
    if not engines:
        torch.autograd.backward(roots, gradients)
        return
    pairs = zip(roots, gradients, strict=True)
    products = sum((root.float() * grad.float()).sum() for root, grad in pairs)
    engines[0].backward(products, scale_wrt_gas=False)


# ---- parameters that get gradients not only through the encoder's embeddings ----


def leaves_of(value):
    """The leaf tensors to which a backward pass from `value` adds gradients."""
    nodes, leaves = [value.grad_fn], []
    seen = {*nodes}
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        new = {follower for follower, _ in node.next_functions if follower} - seen
        seen |= new
        nodes += new
    return leaves


def split_by_wrapper(own, wrappers, *, everything):
    """(the pairs of `own` whose parameters belong to these wrappers, the other pairs).

    own: [(parameter of a loss, its gradient)]; the encoder may hold the parameter too.
    everything: whether all pairs go into the first list.
    """
    ids = {id(p) for wrapper in wrappers for p in _parameters(wrapper)}
    theirs, others = [], []
    for pair in own:
        (theirs if everything or id(pair[0]) in ids else others).append(pair)
    return theirs, others


def backpropagate_early(wrappers, own):
    """Backpropagates the pairs of `own` that must come before the second pass; returns the others.

    own: as in `split_by_wrapper`. These pairs have parameters of a DistributedDataParallel that
    looks for unused parameters: it considers those that the last forward pass did not use as ready
    to be reduced.
    """
    searching = [w for w in wrappers if _is_ddp(w) and w.find_unused_parameters]
    early, others = split_by_wrapper(own, searching, everything=False)
    if early:
        with reducing(searching, [False] * len(searching)):
            torch.autograd.backward([p for p, _ in early], [grad for _, grad in early])
    return others


@contextlib.contextmanager
def reducing_all(wrappers):
    """A context for the last backward pass of these wrappers: it reduces all their gradients.

    DistributedDataParallel reduces when every parameter has received a gradient in this pass, or,
    if it looks for unused parameters, when any has. So parameters that only earlier micro-batches
    used get a gradient of zeros: for example the image tower of a module whose texts come last.
    """
    waiting = [w for w in wrappers if _is_ddp(w) and w.require_backward_grad_sync]
    reached, handles = set(), []

    def reach(parameter):
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        handles.append(node.register_hook(lambda *_: reached.add(parameter)))

    for parameter in (p for w in waiting for p in w.parameters() if p.requires_grad):
        reach(parameter)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for wrapper in waiting:
        learnt = [p for p in wrapper.parameters() if p.requires_grad and p.grad is not None]
        late = [p.view_as(p) for p in learnt if p not in reached]
        unused = wrapper.find_unused_parameters
        if not late or (unused and len(late) < len(learnt)):
            continue
        if unused:
            wrapper.reducer.prepare_for_backward(late)  # the forward pass has used none of them
        torch.autograd.backward(late, [p.new_zeros(()).expand_as(p) for p in late])


def _is_ddp(wrapper):
    return isinstance(wrapper, torch.nn.parallel.DistributedDataParallel)


def _parameters(wrapper):
    return getattr(wrapper, "parameters", list)()
