"""Log-sum-exps over all scores, and selection within groups, on every backend."""

import itertools

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.checks import SIMILARITIES
from fastsim.engine.log_sum_exp import guide_cosines, log_sum_exp
from tests.measure import assert_close
from tests.thresholds import CLEAR

BACKENDS = tuple(fastsim.backends())


def unit(x):
    return x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)


def oracle(x, y, scale, exclude, guide, similarity="cosine"):
    """Rows and columns in float64, by loops over the pairs that take part."""
    scores, rows, columns = x @ y.T if similarity == "dot" else unit(x) @ unit(y).T, [], []
    part = torch.ones_like(scores, dtype=torch.bool)
    if exclude is not None:
        part &= torch.tensor([[a != b for b in exclude[1].tolist()] for a in exclude[0].tolist()])
    if guide is not None:
        g, h, thresholds = (t.double() for t in guide)
        part &= ~(unit(g) @ unit(h).T > thresholds[:, None])
    for i in range(len(x)):
        rows.append(torch.logsumexp(scale * scores[i][part[i]], 0))
    for j in range(len(y)):
        columns.append(torch.logsumexp(scale * scores[:, j][part[:, j]], 0))
    return torch.stack(rows), torch.stack(columns)


def clear_guide(rows, columns, backend):
    """(embeddings of either side, thresholds), no cosine within rounding of a threshold."""
    while True:
        x, y = torch.randn(rows, 5), torch.randn(columns, 5)
        thresholds = guide_cosines(x, y[:rows], backend=backend) + 0.3
        gaps = unit(x.double()) @ unit(y.double()).T - thresholds[:, None]
        if (gaps.abs() > CLEAR).all():
            return x, y, thresholds


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("self_similarity", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp(backend, dtype, self_similarity, similarity, usable, small_panels):
    usable(backend)
    rows, columns, width = 41, 41 if self_similarity else 87, 9
    compute = torch.promote_types(dtype, torch.float32)
    for excluded, guided, both in itertools.product((False, True), repeat=3):
        # Of such a size that products are about as large as cosines.
        x, y = (torch.randn(n, width).div(width**0.5).to(dtype) for n in (rows, columns))
        y = x if self_similarity else y
        exclude = (torch.arange(rows), torch.arange(columns) % rows) if excluded else None
        guide = clear_guide(rows, columns, backend) if guided else None
        scale = torch.tensor(7.0, dtype=compute)
        mix = torch.rand(rows + columns * both, dtype=torch.float64)  # one sign: no cancellation

        def run(calculate, kind, tensors=(x, y, scale), mix=mix):
            number = torch.promote_types(kind, torch.float32)
            kinds = kind, kind, number
            a, b, s = (
                t.detach().to(k).requires_grad_() for t, k in zip(tensors, kinds, strict=True)
            )
            b = a if self_similarity else b
            value = calculate(a, b, s)
            value.masked_fill(value.isinf(), 0.0).mul(mix).sum().backward()
            grads = [t.grad for t in ((a, s) if self_similarity else (a, b, s))]
            return [value.detach(), *grads]

        def truth(a, b, s, options=(exclude, guide), both=both):
            return torch.cat(oracle(a, b, s, *options, similarity)[: 1 + both])

        def ours(a, b, s, options=(exclude, guide), both=both, backend=backend):
            other = None if self_similarity else b
            parts = log_sum_exp(
                a, other, scale=s, exclude=options[0], guide=options[1], columns=both,
                similarity=similarity, backend=backend,
            )  # fmt: skip
            assert both == isinstance(parts, tuple)
            return torch.cat(parts) if both else parts

        got, exact = run(ours, dtype), run(truth, torch.float64)
        plain = run(lambda *a: ours(*a, backend="eager"), compute)
        assert got[0].dtype == torch.float64
        assert torch.equal(got[0].isinf(), exact[0].isinf())
        for part, (one, right, dense) in enumerate(zip(got, exact, plain, strict=True)):
            one, right, dense = (v.masked_fill(v.isinf(), 0.0) for v in (one, right, dense))
            kind = (torch.float64, dtype, compute if self_similarity else dtype, compute)[part]
            kind = compute if part == 0 else kind
            # The dense formula is one draw of rounding; a logit of 7 rounds by 7 eps, one of rows
            # with themselves, of products, is up to three times as large.
            slack = (
                (24 if self_similarity and similarity == "dot" else 8)
                * torch.finfo(compute).eps
                * right.abs().max()
            )
            dense = right + (dense - right).abs().max() + slack
            assert_close(f"part {part}", one, right, dense, kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_takes_part(backend, usable):
    usable(backend)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    rows, columns = log_sum_exp(x, y, scale=9.0, exclude=ids, columns=True, backend=backend)
    assert rows.isneginf().all()
    assert columns.isneginf().all()
    (torch.logaddexp(rows, rows.new_zeros(())).sum() + columns.exp().sum()).backward()
    assert not x.grad.any()
    assert not y.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guide_ties_with_copies(backend, usable, small_panels):
    """A copy of the pair behind the threshold is not above it, wherever its column lies."""
    usable(backend)
    guide = torch.randn(70, 37)
    copies = guide[torch.arange(210) % 70]
    thresholds = guide_cosines(guide.flip(0), guide, backend=backend)
    x, y = torch.zeros(70, 4), torch.zeros(210, 4)
    same = torch.arange(70), torch.arange(210) % 70
    kept = log_sum_exp(
        x, y, scale=1.0, guide=(guide.flip(0), copies, thresholds), backend=backend
    ).exp()
    without = log_sum_exp(
        x, y, scale=1.0, guide=(guide.flip(0), copies, thresholds), exclude=same, backend=backend
    ).exp()
    three = torch.full((70,), 3.0, dtype=torch.float64)
    assert torch.equal((kept - without).round(), three)  # zero scores: the sums are counts


def test_wrong_arguments():
    x, y, thresholds = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3)
    with pytest.raises(ValueError, match="guide columns: wanted 5 rows, got 3"):
        log_sum_exp(x, y, scale=1.0, guide=(x, x, thresholds))
    with pytest.raises(ValueError, match=r"guide thresholds: wanted shape \(3,\), got \(5,\)"):
        log_sum_exp(x, y, scale=1.0, guide=(x, y, torch.zeros(5)))
    with pytest.raises(ValueError, match="scale: wanted a positive"):
        log_sum_exp(x, y, scale=-1.0)


def test_paired_scores_are_the_panels(usable):
    """The same number, bit for bit, from a pair alone and from the panel."""
    usable("cpu")
    backend = get("cpu")
    x, y = torch.randn(300, 77), torch.randn(300, 77)
    block = slice(0, 300), slice(0, 300)
    panel = backend.scores(x, y, block, backend.workspace(x, y))
    assert torch.equal(backend.paired_scores(x, y), panel.diagonal())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nans_is_not_empty(backend, usable):
    """-inf is the log-sum-exp of nothing; that of NaNs is NaN, along rows and columns."""
    usable(backend)
    x, y = torch.randn(5, 4), torch.randn(7, 4)
    x[2] = torch.nan
    rows, columns = log_sum_exp(x, y, scale=3.0, columns=True, backend=backend)
    assert rows.isnan().tolist() == [False, False, True, False, False]
    assert columns.isnan().all()
    y[:] = torch.nan
    rows, columns = log_sum_exp(x, y, scale=3.0, columns=True, backend=backend)
    assert rows.isnan().all()
    assert columns.isnan().all()
