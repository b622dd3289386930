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

    Returns a function with the operator's arguments. Autograd must not record its call: use it
    inside a torch.autograd.Function, or without gradients.
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
    """Whether something records the operators that are called: torch.compile, torch.export or a
    dispatch mode such as that of fake tensors.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def transforming(*values):
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is active, or a value has a tangent
    of forward-mode AD.

    Our autograd.Functions cannot be called then. Values may be tensors, tuples of them or anything.
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
    """Whether one of the values is a tensor wrapped by torch.func (vmap, grad, jvp, ...), or has a
    tangent of forward-mode AD.
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
    """Decorates the `backward` of an autograd.Function, so that its gradients are differentiable.

    formula: (ctx, saved, *inputs) -> the outputs of the Function in plain torch. It gives the
        gradient if a gradient of the gradient may follow (create_graph=True), or if several are
        computed at once (is_grads_batched=True).
    inputs: how many inputs of the Function have gradients. They come first, and are saved first.

    `backward` and `formula` receive `ctx.saved_tensors` as `saved`, because they may be read only
    once: torch.utils.checkpoint computes them for one reader.
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
    """Whether torch.autograd.grad computes several gradients at once."""
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return any(grad is not None and legacy(grad) for grad in above)


def _with_memory(grad):
    """The gradient as a kernel can read it: torch has tensors of zeros without memory."""
    return grad if grad is None or not grad._is_zerotensor() else torch.zeros_like(grad)


def _of_formula(formula, count, ctx, saved, above):
    needs_grad = ctx.needs_input_grad[:count]
    grads = [None] * len(ctx.needs_input_grad)
    with torch.enable_grad():
        # Views, so that an input computed from another one is not differentiated through.
        inputs = [
            value.view_as(value) if want else value
            for value, want in zip(saved, needs_grad, strict=False)
        ]
        outputs = formula(ctx, saved, *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(o, a) for o, a in zip(outputs, above, strict=False) if o.requires_grad]
        places = [place for place, want in enumerate(needs_grad) if want]
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
    """Decorates a `backward` whose gradients cannot be differentiated: trying to is a RuntimeError.

    torch's decorator of this name treats them as constants, so that a gradient penalty would
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
    """Marks a function that torch.compile calls once, and whose result it takes as a constant.

    The same as torch.compiler.assume_constant_result, which imports the compiler and Triton.
    """
    function._dynamo_marked_constant = True
    return function


def constant_once(function):
    """A `constant_result` that is computed once for the same arguments."""
    found = functools.cache(function)

    # torch.compile warns of a cache that it looks into.
    @functools.wraps(function)
    def result(*arguments):
        return found(*arguments)

    return constant_result(result)
