"""Log-sum-exps with exclusions and a guide, and selection within groups, against float64 loops."""

import pytest
import torch

from fastsim.engine.log_sum_exp import guide_cosines, log_sum_exp
from fastsim.losses import batch_hard_triplet
from tests.engine.test_log_sum_exp import oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 32, 64), (21, 45, 40)], ids=str)
def test_log_sum_exp(shape, dtype):
    rows, columns, width = shape
    x, y = (torch.randn(n, width).to(dtype) for n in (rows, columns))
    # Three lines of float32 numbers: no whole steps of a product of 16-bit rows.
    g, h = torch.randn(rows, 70), torch.randn(columns, 70)
    thresholds = guide_cosines(g, h[:rows], backend="triton") + 0.1
    ids = torch.arange(rows), torch.arange(columns) % rows
    mix = torch.rand(rows + columns, dtype=torch.float64)

    def run(calculate, kind):
        a, b = (t.to(kind).requires_grad_() for t in (x, y))
        scale = torch.tensor(7.0, dtype=torch.promote_types(kind, torch.float32))
        value = torch.cat(calculate(a, b, scale.requires_grad_()))
        value.masked_fill(value.isinf(), 0.0).mul(mix).sum().backward()
        return [value.detach(), a.grad, b.grad, scale.grad]

    exact = run(lambda a, b, s: oracle(a, b, s, ids, (g, h, thresholds)), torch.float64)
    got = run(
        lambda a, b, s: log_sum_exp(
            a, b, scale=s, exclude=ids, guide=(g, h, thresholds), columns=True, backend="triton"
        ),
        dtype,
    )
    # Cosines of float16 operands, and the logits 7 times as large, are rounded to its spacing.
    spacing = torch.finfo(torch.float16 if dtype.itemsize == 2 else torch.float32).eps
    returned = torch.finfo(dtype).eps
    assert torch.equal(got[0].isinf(), exact[0].isinf())
    for one, right, kind in zip(got, exact, (0, returned, returned, 0), strict=True):
        one, right = (v.double().masked_fill(v.isinf(), 0.0) for v in (one, right))
        allowed = (4 * 7 * spacing + kind) * right.abs().max().clamp(min=1)
        assert (one - right).abs().max() <= allowed


@pytest.mark.parametrize("of_guide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pair_ties_with_its_threshold(dtype, of_guide):
    """By the products of the guide's type, whatever that of the embeddings is."""
    x = torch.randn(21, 40).to(dtype)
    g, h = (torch.randn(21, 70).to(of_guide) for _ in "gh")
    guide = g, h, guide_cosines(g, h, backend="triton")
    found = log_sum_exp(x, x, scale=100.0, guide=guide, backend="triton")
    # A row's cosine with itself is 1, and far below with any other.
    assert (found > 99).all()


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_batch_hard_triplet(distance):
    x, labels = torch.randn(37, 6), torch.randint(0, 7, (37,))
    results = []
    for backend in ("triton", "eager"):
        leaf = x.clone().requires_grad_()
        loss = batch_hard_triplet(leaf, labels, margin=0.7, distance=distance, backend=backend)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
