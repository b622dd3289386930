"""Registration of operators: opaque to torch.compile, with shapes for tracing.

Gradients are in torch.autograd.Functions around them rather than registered with them: the
generic wrapper of torch.library.custom_op costs more than a small batch's whole loss.
"""

import torch

_library = torch.library.Library("fastsim", "DEF")


def define(name, schema, implementation, fake):
    """Registers torch.ops.fastsim.<name>; `fake` returns empty tensors of the right shapes."""
    _library.define(name + schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastsim::{name}", fake, lib=_library)
    return getattr(torch.ops.fastsim, name).default
