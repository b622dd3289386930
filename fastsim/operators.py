"""Registration of operators: opaque to torch.compile, with shapes for tracing.

Gradients are in torch.autograd.Functions around them rather than registered with them: the
generic wrapper of torch.library.custom_op costs more than a small batch's whole loss. For the same
reason a call goes straight to the implementation unless something traces or intercepts it.
"""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_library = torch.library.Library("fastsim", "DEF")


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
