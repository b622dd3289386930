"""SigLIP of so many pairs that its positives are listed (csrc/cpu/one_call.cpp).

If they are few, they are taken one by one, and all other pairs as negatives, without targets.
Otherwise every pair has its target.
"""

import pytest
import torch
from torch.nn.functional import normalize, softplus

import fastsim
from fastsim.backends.cpu import one_call
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

ROWS, COLUMNS, WIDTH = 531, 1063, 12  # 2^18 pairs are enough
DTYPES = (torch.float32, torch.float64)
# The number of groups, whose inverse is the share of positives: of 2^8 pairs one may be a positive.
GROUPS = {"few": 3000, "up to a chunk's": 300, "many": 4}


@pytest.fixture(params=[ROWS, 100], ids=["one band", "bands"])
def in_one_call(request, monkeypatch, usable):
    usable("cpu")
    monkeypatch.setattr(one_call, "band_rows", lambda *_: request.param)
    for instead in ("parts_serve_loss", "blas_is_faster", "parts_are_faster"):
        monkeypatch.setattr(one_call, instead, lambda *_: False)


def sigmoid_loss(groups, positive_weight, x, y, scale, bias):
    """The formula of fastsim/losses/siglip.py over all pairs at once."""
    positive = groups[0][:, None] == groups[1]
    logits = scale * normalize(x, dim=1) @ normalize(y, dim=1).T + bias
    weights = torch.ones_like(logits)
    if positive_weight == "row":
        of_row = positive.sum(1, keepdim=True).to(weights)
        weights = torch.where(positive, 1 / of_row, weights)
    signs = torch.where(positive, -1.0, 1.0).to(logits)
    return (weights * softplus(signs * logits, threshold=100)).sum() / len(x)


def results(loss, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("positive_weight", ["one", "row"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (40.0, 3.0), (-5.0, 1.0)])
def test_against_the_formula(number, dtype, positive_weight, scale, bias, in_one_call):
    random = fresh(90)
    groups = [torch.randint(number, (count,), generator=random) for count in (ROWS, COLUMNS)]
    sides = [torch.randn(n, WIDTH, generator=random, dtype=dtype) for n in (ROWS, COLUMNS)]
    leaves = [*sides, *(torch.tensor(one, dtype=dtype) for one in (scale, bias))]

    def formula(given):
        return results(lambda *all_four: sigmoid_loss(groups, positive_weight, *all_four), given)

    def fused(x, y, scale, bias):
        options = {"targets": groups, "positive_weight": positive_weight, "backend": "cpu"}
        return fastsim.siglip(x, y, scale=scale, bias=bias, **options)

    truth = formula([leaf.double() for leaf in leaves])
    moved = conditioning(formula, [leaf.double() for leaf in leaves])
    eps = torch.finfo(dtype).eps
    names = ("loss", "gradient of x", "gradient of y", "gradient of scale", "gradient of bias")
    with torch.no_grad():
        alone = fused(*leaves)
    dense = formula(leaves)
    assert_close("loss alone", alone, truth[0], dense[0], dtype, moved=eps * moved[0])
    for name, got, *rest, by in zip(
        names, results(fused, leaves), truth, dense, moved, strict=True
    ):
        assert_close(name, got, *rest, dtype, moved=eps * by)


def test_a_nan_reaches_loss_and_gradients(in_one_call):
    groups = torch.arange(ROWS), torch.arange(COLUMNS)
    sides = [torch.randn(n, WIDTH, generator=fresh(91)) for n in (ROWS, COLUMNS)]
    sides[0][7, 3] = torch.nan
    loss, grad_x, grad_y = results(
        lambda x, y: fastsim.siglip(x, y, targets=groups, backend="cpu"), sides
    )
    assert loss.isnan()
    assert grad_y.isnan().all()
    assert torch.equal(grad_x.isnan(), sides[0].isnan().any(1, keepdim=True).expand_as(grad_x))


def test_metrics_are_those_of_every_pair(in_one_call):
    """The recording of metrics reads the same lists."""
    random = fresh(92)
    groups = [torch.randint(3000, (count,), generator=random) for count in (ROWS, COLUMNS)]
    sides = [torch.randn(n, WIDTH, generator=random).double() for n in (ROWS, COLUMNS)]

    def metrics(backend):
        with fastsim.metrics() as seen:
            fastsim.siglip(*sides, targets=groups, backend=backend)
        return seen.read()

    theirs = metrics("torch")
    assert theirs
    assert metrics("cpu") == pytest.approx(theirs)
