"""Registration of operators: opaque to torch.compile, with shapes for tracing.

Gradients are in torch.autograd.Functions around them rather than registered with them: the
generic wrapper of torch.library.custom_op costs more than a small batch's whole loss. For the same
reason a call goes straight to the implementation unless something traces or intercepts it.
"""

import functools
import typing

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return operator(*arguments)
        return implementation(*arguments)

    call.operator = operator
    return call


def once_differentiable(backward):
    """A `backward` whose gradients have none of their own: a RuntimeError where one is wanted.

    torch's decorator of that name lets them pass as constants where what comes from above has no
    gradient itself, so that a gradient penalty on a plain loss would silently count for nothing.
    """

    @functools.wraps(backward)
    def once(ctx, *above):
        with torch.no_grad():
            found = backward(ctx, *above)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        found = found if isinstance(found, tuple) else (found,)
        leaves = [None if part is None else part.detach().requires_grad_() for part in found]
        return _NoSecondDerivative.apply(*leaves)

    return once


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *gradients):
        return tuple(part if part is None else part.view_as(part) for part in gradients)

    @staticmethod
    def backward(ctx, *above):
        raise RuntimeError(
            "wanted the gradient of a gradient (create_graph=True), got one of a fastsim loss,"
            ' which is differentiated once; with backend="eager" most losses are twice'
        )
