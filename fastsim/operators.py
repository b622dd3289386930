"""Registration of operators: opaque to torch.compile, with shapes for tracing.

Gradients are in torch.autograd.Functions around them rather than registered with them: the
generic wrapper of torch.library.custom_op costs more than a small batch's whole loss. For the same
reason a call goes straight to the implementation unless something traces or intercepts it.

A kernel gives a first derivative. Further ones are those of a plain torch formula:
`differentiable_again` takes the formula where the gradient itself is to be differentiated, and
`transforming` tells where torch.func or forward-mode AD asks for more than a kernel has, so that
the call is left to the eager backend from the beginning.
"""

import functools
import typing
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

ONCE = (
    "wanted a gradient that can be differentiated again (create_graph=True), got that of a fastsim"
    " loss of a process group, which can be differentiated only once"
)

_library = torch.library.Library("fastsim", "DEF")


_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    list[bool]: "bool[]",
    int: "int",
    float: "float",
    float | None: "float?",
    str: "str",
}


def schema_of(record):
    """The arguments of an operator, as `define` wants them, from the fields of a typed record."""
    fields = typing.get_type_hints(record).items()
    return ", ".join(f"{_TYPES[kind]} {name}" for name, kind in fields)


def define(name, schema, implementation, fake):
    """Registers torch.ops.fastsim.<name>; `fake` returns empty tensors of the right shapes.

    Returns a function of the operator's arguments, for use where autograd does not record: inside
    a torch.autograd.Function or without a gradient to keep.
    """
    _library.define(name + schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastsim::{name}", fake, lib=_library)
    operator = getattr(torch.ops.fastsim, name).default

    def call(*arguments):
        if traced():
            return operator(*arguments)
        return implementation(*arguments)

    call.operator = operator
    return call


def traced():
    """Whether something records the operators that are called: torch.compile, torch.export, or a
    dispatch mode as that of fake tensors.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def transforming(*values):
    """Whether torch.func (vmap, grad, jvp, ...) is at work or a value has a forward-mode tangent.

    No autograd.Function of ours can be called then. Values may be tensors, tuples of them, or
    anything else.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.autograd.forward_ad._current_level < 0:
        return False
    several = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return transformed(*chain.from_iterable(several))


def transformed(*values):
    """Whether one of the values is a tensor that torch.func (vmap, grad, jvp, ...) has wrapped, or
    that has a tangent of forward-mode AD.
    """
    if torch.compiler.is_compiling():
        return False
    wrapped = torch._C._are_functorch_transforms_active()
    if not wrapped and torch.autograd.forward_ad._current_level < 0:
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if wrapped and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return True
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def differentiable_again(formula, *, inputs):
    """A decorator of the `backward` of an autograd.Function: its gradients are differentiable.

    formula(ctx, saved, *inputs) gives the Function's outputs in plain torch. Where a gradient of
    the gradient may be asked for (create_graph=True), or several at once (is_grads_batched=True),
    the gradient is that of the formula. inputs: how many of the Function's inputs have gradients;
    they are its first ones, and the first that it has saved.

    Both it and backward(ctx, saved, *above) are given `ctx.saved_tensors`, which may be read once
    only: torch.utils.checkpoint computes them for one reader.
    """

    def decorate(backward):
        @functools.wraps(backward)
        def first_or_again(ctx, *above):
            saved = ctx.saved_tensors
            if torch.compiler.is_compiling():
                with torch.no_grad():
                    return backward(ctx, saved, *above)
            if torch.is_grad_enabled() or transformed(*above) or _batched(above):
                return _of_formula(formula, inputs, ctx, saved, above)
            return backward(ctx, saved, *map(_with_memory, above))

        return first_or_again

    return decorate


def _batched(above):
    """Whether torch.autograd.grad runs the backward pass for several gradients at once."""
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return any(grad is not None and legacy(grad) for grad in above)


def _with_memory(grad):
    """The gradient as a kernel can read it: torch has tensors of zeros that have no memory."""
    return grad if grad is None or not grad._is_zerotensor() else torch.zeros_like(grad)


def _of_formula(formula, count, ctx, saved, above):
    wants = ctx.needs_input_grad[:count]
    grads = [None] * len(ctx.needs_input_grad)
    with torch.enable_grad():
        # Views, so that an input that is made of another one is not differentiated through.
        inputs = [
            value.view_as(value) if want else value
            for value, want in zip(saved, wants, strict=False)
        ]
        outputs = formula(ctx, saved, *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, a) for o, a in zip(outputs, above, strict=False) if o.requires_grad]
        places = [place for place, want in enumerate(wants) if want]
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [inputs[place] for place in places],
            [grad for _, grad in pairs],
            create_graph=True,
            materialize_grads=True,
        )
    for place, grad in zip(places, found, strict=True):
        grads[place] = grad
    return tuple(grads)


def once_differentiable(backward):
    """A `backward` whose gradients have none of their own: a RuntimeError where one is wanted.

    torch's decorator of that name lets them pass as constants, so that a gradient penalty would
    silently count for nothing.
    """

    @functools.wraps(backward)
    def once(ctx, *above):
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        with torch.no_grad():
            return backward(ctx, *above)

    return once


def constant_result(function):
    """What torch.compile is to call once, taking the result for a constant.

    As torch.compiler.assume_constant_result, which imports the whole compiler, and Triton with it.
    """
    function._dynamo_marked_constant = True
    return function


def constant_once(function):
    """A `constant_result` that is found once for the same arguments."""
    found = functools.cache(function)

    # torch.compile warns of a cache that it looks into.
    @functools.wraps(function)
    def result(*arguments):
        return found(*arguments)

    return constant_result(result)
