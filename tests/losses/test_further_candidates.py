"""Own negatives and references of InfoNCE against the oracle; what is refused together."""

import pytest
import torch

import fastsim
from fastsim.engine.one_call import in_panels
from tests import oracles
from tests.cases import call
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())
EVERYWHERE = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# What the documents of other queries and the queries of a document have in common, or not.
ASKED = {
    "alone": {},
    "positives": {"positives": torch.randint(0, 21, (13,))},
    "margin": {"margin": 0.2},
    "excluded": {"exclude": (torch.arange(13) % 5, torch.arange(21) % 7)},
    "biased": {"candidate_bias": torch.randn(21)},
    "guided": {"guide": (torch.randn(13, 3), torch.randn(21, 3)), "guide_margin": 0.1},
}


OPTIONS = {
    "own": {"exclude_above": 0.2, "margin": 0.1},
    "references": {"temperature": 0.1},
    "both": {"temperature": 2.0, "similarity": "dot", "directions": EVERYWHERE},
    **{f"both, {name}": {"temperature": 0.5} | given for name, given in ASKED.items()},
}


def with_own(loss, name):
    """The loss as a function of its embeddings, own negatives among them."""

    def function(x, y, own, references, **options):
        given = {"own": {"own_negatives": own}, "references": {"references": references}}
        given["both"] = given["own"] | given["references"]
        return loss(x, y, **given[name.partition(",")[0]], **options) + 0 * own.sum()

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


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ways_through_the_same_scores(backend, name, usable, small_panels):
    usable(backend)
    tensors = [torch.randn(rows, 8) for rows in (13, 21)]
    options = ASKED[name] | {"directions": ("query_to_doc", "doc_to_query"), "reduction": "none"}

    def truth(sides):
        given = {key: value for key, value in options.items() if key != "reduction"}
        value, grads = call(oracles.info_nce, sides, [], given)
        return [value, *grads]

    wide = [t.double() for t in tensors]
    with in_panels():
        got = call(fastsim.info_nce, tensors, [], options | {"backend": backend})
    plain = call(fastsim.info_nce, tensors, [], options | {"backend": "eager"})
    moved = conditioning(truth, wide)
    results = zip([got[0], *got[1]], truth(wide), [plain[0], *plain[1]], moved, strict=True)
    eps = torch.finfo(torch.float32).eps
    for place, (mine, exact, theirs, move) in enumerate(results):
        assert_close(f"result {place}", mine, exact, theirs, torch.float32, 1.0, eps * move)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"positives": torch.tensor([2, 0])}])
def test_references_without_a_row_are_none(options):
    """A queue before the first batch; only the first call of a signature is not a repetition."""
    x, y = torch.randn(2, 6), torch.randn(3 if options.keys() == {"positives"} else 2, 6)
    for _ in range(3):
        got = fastsim.info_nce(x, y, references=torch.empty(0, 6), **options)
        assert torch.equal(got, fastsim.info_nce(x, y, **options))
        x, y = torch.randn_like(x), torch.randn_like(y)
    with pytest.raises(ValueError, match="references: wanted width 6"):
        fastsim.info_nce(x, y, references=torch.empty(0, 5), **options)


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
        (
            {"directions": EVERYWHERE, "symmetric": True},
            "directions: cannot be combined with symmetric",
        ),
        (
            {"label_smoothing": 0.1, "margin": 0.1},
            "label_smoothing: cannot be combined with margin",
        ),
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
