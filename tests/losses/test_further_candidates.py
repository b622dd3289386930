"""Own negatives and references of InfoNCE against the oracle; what is refused together."""

import pytest
import torch

import fastsim
from tests import oracles
from tests.cases import call
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())
EVERYWHERE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = {
    "own": {"exclude_above": 0.2, "margin": 0.1},
    "references": {"temperature": 0.1},
    "both": {"temperature": 2.0, "similarity": "dot", "directions": EVERYWHERE},
}


def with_own(loss, name):
    """The loss as a function of its embeddings, own negatives among them."""

    def function(x, y, own, references, **options):
        given = {"own": {"own_negatives": own}, "references": {"references": references}}
        given["both"] = given["own"] | given["references"]
        return loss(x, y, **given[name], **options) + 0 * own.sum()

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_oracle(name, backend, dtype, usable, small_panels):
    usable(backend)
    shapes = (13, 8), (21, 8), (13, 3, 8), (70, 8)
    *tensors, references = (torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes)
    options, compute = OPTIONS[name], torch.promote_types(dtype, torch.float32)

    def truth(sides):
        oracle = with_own(lambda *a, **k: oracles.info_nce(*a, **k).mean(), name)
        value, grads = call(oracle, sides, [references.double()], options)
        return [value, *grads]

    wanted = truth([t.double() for t in tensors])
    moved = conditioning(truth, [t.double() for t in tensors])
    loss, dense = with_own(fastsim.info_nce, name), [t.to(compute) for t in tensors]
    plain = call(loss, dense, [references.to(compute)], options | {"backend": "eager"})
    got = call(loss, tensors, [references], options | {"backend": backend})
    eps = torch.finfo(compute).eps
    results = zip([got[0], *got[1]], wanted, [plain[0], *plain[1]], moved, strict=True)
    for place, (mine, exact, theirs, move) in enumerate(results):
        rounding = dtype if place else compute
        assert_close(f"result {place}", mine, exact, theirs, rounding, 1.0, eps * move)


def test_references_get_no_gradient():
    x, references = torch.randn(4, 6), torch.randn(9, 6, requires_grad=True)
    fastsim.info_nce(x.requires_grad_(), x.detach(), references=references).backward()
    assert references.grad is None


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_metrics_are_those_of_anchors_with_candidates(backend, usable):
    usable(backend)
    x, y, found = torch.randn(9, 6), torch.randn(12, 6), []
    for options in ({}, {"directions": EVERYWHERE}):
        with fastsim.metrics() as seen:
            fastsim.info_nce(x, y, backend=backend, **options)
        found.append(seen.read())
    # Rounding of one product or the other; another part's scores would move them by far more.
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": EVERYWHERE, "symmetric": True}, "directions: wanted without symmetric"),
        ({"label_smoothing": 0.1, "margin": 0.1}, "label_smoothing: wanted without margin"),
        ({"directions": ("query_to_query",)}, "directions: wanted 'query_to_doc' among them"),
        ({"directions": ("query_to_doc", "up")}, "directions: wanted one of .* got 'up'"),
        ({"own_negatives": torch.ones(3, 2, 6)}, "own_negatives: wanted 4 rows, .* anchors, got 3"),
        ({"references": torch.ones(3, 5)}, "references: wanted width 6, .* anchors, got 5"),
        ({"guide": (torch.ones(4, 2), torch.ones(5, 2))}, r"guide\[1\]: wanted 4 rows, got 5"),
        ({"guide_strategy": "loose"}, "guide_strategy: wanted one of 'absolute', 'relative'"),
        ({"label_smoothing": 1.0}, "label_smoothing: wanted at least 0 and below 1, got 1"),
    ],
)
def test_errors(options, message):
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=message):
        fastsim.info_nce(x, x, **options)
