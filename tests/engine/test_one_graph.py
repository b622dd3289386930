"""A loss is one graph for torch.compile, with every torch that is supported."""

import torch

import fastsim
from tests.seeds import fresh


def test_a_loss_compiles_in_one_graph():
    """Traced and run as it is: no code is made, so that this is quick."""
    x, y = (torch.randn(5, 4, generator=fresh(61)).requires_grad_() for _ in "xy")
    torch._dynamo.reset()
    compiled = torch.compile(fastsim.info_nce, fullgraph=True, backend="eager")
    found, wanted = compiled(x, y), fastsim.info_nce(x, y)
    assert torch.equal(found, wanted)
    for one, other in zip(
        *(torch.autograd.grad(loss, (x, y)) for loss in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)
