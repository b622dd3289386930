"""CoSENT over a matrix with few and with many distinct targets: two ways of summing by level."""

import pytest
import torch

import fastsim

pytestmark = pytest.mark.skipif(fastsim.backends()["cpu"] is not None, reason="needs the extension")


def oracle(scores, targets, scale):
    """log(1 + sum over pairs of entries of which the first is labelled higher), by a loop."""
    s, t = scale * scores.flatten(), targets.flatten().double()
    terms = [torch.zeros(1, dtype=torch.float64)]
    terms += [s[t < label] - value for value, label in zip(s, t, strict=True)]
    return torch.logsumexp(torch.cat(terms), 0)


@pytest.mark.parametrize("count", [2, 3, 8, 9, 17, 26, 100])
def test_every_number_of_levels(count, small_panels, in_passes):
    """Loss and gradient for K levels, in float64 to the last digits."""
    x, y = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (19, 70))
    targets = torch.randint(0, count, (19, 70)).float() / count
    unit = [side / side.norm(dim=1, keepdim=True) for side in (x, y)]
    wanted = oracle(unit[0] @ unit[1].T, targets, 20.0)
    got = fastsim.cosent_matrix(x, y, targets, scale=20.0, backend="cpu")
    # log-sum-exps over all entries, whose logits are known to an ulp of the scale.
    allowed = 20 * torch.finfo(torch.float64).eps * targets.numel() ** 0.5
    torch.testing.assert_close(got, wanted, rtol=0, atol=allowed)
    grads = [torch.autograd.grad(loss, (x, y)) for loss in (got, wanted)]
    for mine, theirs in zip(*grads, strict=True):
        most = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=20 * allowed * most)
