"""What `fastsim.metrics` reads of every loss against loops over the scores."""

import math
import threading

import pytest
import torch

import fastsim
from fastsim.backends import WITH_METRICS
from fastsim.backends.cpu import further
from fastsim.grad_cache import GradCache
from tests.cases import CASES, SHAPES, call, inputs
from tests.measure import assert_close

BACKENDS = ("cpu", "torch")
UNSEEN = ("batch_hard_triplet", "batch_semi_hard_triplet", "batch_all_triplet")  # of distances
OTHERS = ("cosent", "angle", "triplet_margin", "cosine_regression", "late_interaction")
OTHERS += ("late_interaction_distillation", "distill")
SEEN = [case for case in CASES if case.loss.__name__ not in UNSEEN + OTHERS]
NOT_SEEN = [case for case in CASES if case.loss.__name__ in UNSEEN + OTHERS]
NAMES = {"accuracy", "positive", "negative", "hardest_negative", "excluded_by_id"}
NAMES |= {"excluded_by_score", "alignment", "uniformity"}


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


def role_of(case, scores, others, options):
    """(row, column) -> "positive", "negative", "id", "score", or None for no candidate."""
    given = others[0] if others else options.get("targets")
    grouped = case.loss.__name__ in ("sup_con", "nt_xent", "multi_similarity", "circle")

    def positive_of(i):
        return i if grouped or given is None or isinstance(given, tuple) else int(given[i])

    def guided(i, j):
        rows, columns = options["guide"]
        return cosine(rows[i], columns[j])

    def limit_of(i):
        own, margin = guided(i, positive_of(i)), options.get("guide_margin", 0.0)
        return own - margin * (abs(own) if options.get("guide_strategy") == "relative" else 1.0)

    def role(i, j):
        if grouped:
            return None if i == j else "positive" if given[i] == given[j] else "negative"
        if case.name == "cosent_matrix-self" and j <= i:
            return None
        if isinstance(given, tuple):
            return "positive" if given[0][i] == given[1][j] else "negative"
        if isinstance(given, torch.Tensor) and given.dim() == 2:
            return "positive" if given[i, j] > 0 else "negative"
        if j == positive_of(i):
            return "positive"
        ids, above = options.get("exclude"), options.get("exclude_above")
        if ids is not None and ids[0][i] == ids[1][j]:
            return "id"
        if above is not None and scores[i][j] > scores[i][positive_of(i)] + above:
            return "score"
        if "guide" in options and guided(i, j) > limit_of(i):
            return "score"
        return "negative"

    return role


def oracle(case, tensors, others, options):
    """The numbers by loops in float64, as `Metrics.read` names them."""
    x = tensors[0]
    y = x if len(tensors) < 2 or tensors[1] is None else tensors[1]
    dots = options.get("similarity") == "dot"
    scores = [[(a @ b).item() if dots else cosine(a, b) for b in y] for a in x]
    role = role_of(case, scores, others, options)
    pairs = {name: [] for name in ("positive", "negative", "id", "score")}
    hits, hardest = [], []
    for i, row in enumerate(scores):
        mine = {name: [] for name in pairs}
        for j, score in enumerate(row):
            if role(i, j) is not None:
                mine[role(i, j)].append(score)
        for name, values in mine.items():
            pairs[name] += values
        if mine["positive"]:
            hits.append(max(mine["positive"]) > max(mine["negative"], default=-math.inf))
        if mine["negative"]:
            hardest.append(max(mine["negative"]))
    found = {"accuracy": hits, "hardest_negative": hardest}
    found |= {name: pairs[name] for name in ("positive", "negative")}
    found["alignment"] = [2 - 2 * score for score in pairs["positive"]]
    found = {name: math.fsum(values) / len(values) for name, values in found.items() if values}
    found |= {f"excluded_by_{name}": len(pairs[name]) / len(x) for name in ("id", "score")}
    if dots:
        found.pop("alignment", None)
        return found
    sides = []
    for side in (x,) if y is x else (x, y):
        half = len(side) // 2
        if half:
            gaps = [2 - 2 * cosine(side[i], side[i + half]) for i in range(half)]
            sides.append(math.log(math.fsum(math.exp(-2 * gap) for gap in gaps) / half))
    if sides:
        found["uniformity"] = sum(sides) / len(sides)
    return found


def seen_by(case, tensors, others, options, **extra):
    with fastsim.metrics() as seen:
        value, grads = call(case.loss, tensors, others, options | extra)
    return seen.read(), value, grads


def compare(case, backend, shape, seed, dtype=torch.float64):
    tensors, others, options = inputs(case, shape, dtype, seed)
    doubles = [t if t is None else t.double() for t in tensors]
    truth = oracle(case, doubles, others, options)
    got, _, _ = seen_by(case, tensors, others, options, backend=backend)
    # No score passes the product of the norms, which for cosines is 1.
    norms = [t.norm(dim=1).max().item() for t in doubles if t is not None]
    largest = max(norms) ** 2 if options.get("similarity") == "dot" else 1.0
    assert got.keys() == truth.keys() <= NAMES
    for name, value in truth.items():
        wanted = torch.tensor(value, dtype=torch.float64)
        mine = torch.tensor(got[name], dtype=torch.float64)
        # A share or a mean of counts is exact. Uniformity has t = 2, twice, before its exponents.
        exact = name == "accuracy" or name.startswith("excluded")
        size = 0.0 if exact else 4.0 * largest
        assert_close(name, mine, wanted, wanted, torch.promote_types(dtype, torch.float32), size)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SEEN, ids=repr)
def test_equals_the_loops(case, backend, shape, usable):
    usable(backend)
    compare(case, backend, shape, seed=5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SEEN, ids=repr)
def test_many_panels(case, backend, small_panels, in_passes, usable):
    usable(backend)
    compare(case, backend, (26, 79, 10) if "full" not in case.name else (26, 29, 10), seed=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_types(backend, dtype, usable):
    usable(backend)
    case = next(c for c in SEEN if c.name == "info_nce-everything")
    compare(case, backend, (13, 29, 18), seed=7, dtype=dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SEEN, ids=repr)
def test_the_loss_has_the_same_bits(case, backend, reduction, usable, monkeypatch):
    usable(backend)
    monkeypatch.setattr(further, "FEW", 0)  # else plain torch computes the loss without metrics
    tensors, others, options = inputs(case, (21, 27, 9), torch.float32, 8)
    options |= {"backend": backend} | ({"reduction": reduction} if case.reduces else {})
    value, grads = call(case.loss, tensors, others, options)
    _, watched_value, watched_grads = seen_by(case, tensors, others, options)
    assert torch.equal(value, watched_value)
    assert all(map(torch.equal, grads, watched_grads))
    with torch.no_grad():
        plain = case.loss(*tensors, *others, **options)
        with fastsim.metrics() as seen:
            assert torch.equal(case.loss(*tensors, *others, **options), plain)
    assert seen.read()


def two_sides(rows=12, width=6):
    return torch.randn(2, rows, width, dtype=torch.float64)


def test_several_calls_are_one_batch_of_all():
    (x, y), (u, v) = two_sides(10), two_sides(30)
    with fastsim.metrics() as both:
        fastsim.info_nce(x, y)
        with fastsim.metrics() as second:
            fastsim.siglip(u, v)
    with fastsim.metrics() as first:
        fastsim.info_nce(x, y)
    one, other = first.read(), second.read()
    wanted = (10 * one["accuracy"] + 30 * other["accuracy"]) / 40
    assert both.read()["accuracy"] == pytest.approx(wanted)
    both.clear()
    assert both.read() == {}


def test_a_block_goes_on_after_one_within_and_with_what_it_is_given():
    (x, y), (u, v) = two_sides(10), two_sides(30)
    with fastsim.metrics() as whole:
        with fastsim.metrics() as first:
            fastsim.info_nce(x, y)
        fastsim.siglip(u, v)
    with fastsim.metrics(first) as both:
        fastsim.siglip(u, v)
    assert both is first
    assert both.read() == whole.read()


def test_nothing_is_seen_outside():
    x, y = two_sides()
    with fastsim.metrics() as seen:
        pass
    fastsim.info_nce(x, y)
    with pytest.raises(ValueError, match="temperature"), seen_block() as kept:
        fastsim.info_nce(x, y, temperature=-1.0)
    fastsim.info_nce(x, y)
    assert seen.read() == kept.read() == {}


seen_block = fastsim.metrics


def test_a_block_is_that_of_its_thread():
    other = threading.Thread(target=fastsim.info_nce, args=two_sides())
    with fastsim.metrics() as seen:
        other.start()
        other.join()
    assert seen.read() == {}


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tie_is_a_miss(backend, passes, usable, request):
    usable(backend)
    if passes:
        request.getfixturevalue("in_passes")
    x = torch.ones(4, 3)
    with fastsim.metrics() as seen:
        fastsim.info_nce(x, x, backend=backend)
    assert seen.read()["accuracy"] == 0
    assert seen.read()["uniformity"] == pytest.approx(0, abs=8 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("case", NOT_SEEN, ids=repr)
def test_losses_without_pairs_of_a_batch_are_not_seen(case):
    found, _, _ = seen_by(case, *inputs(case, (5, 7, 4), torch.float64, 1))
    assert found == {}


def test_grad_cache_is_seen_once():
    x, y = two_sides().float()
    encode = torch.nn.Linear(6, 5)
    with fastsim.metrics() as whole:
        fastsim.info_nce(encode(x), encode(y))
    cache = GradCache(encode, fastsim.losses.InfoNCE(), micro_batch_size=5)
    with fastsim.metrics() as seen:
        cache.backward(x, y)
    assert seen.read() == pytest.approx(whole.read(), abs=16 * torch.finfo(x.dtype).eps)


def test_a_backend_that_does_not_record_refuses():
    x, y = two_sides()
    message = r"does not record scores for `fastsim\.metrics`"
    with fastsim.metrics(), pytest.raises(RuntimeError, match=message):
        fastsim.info_nce(x, y, backend="eager")
    assert "softmax" in WITH_METRICS


def test_dot_products_have_no_alignment():
    from fastsim.integrations.products import cross_entropy

    x, y = two_sides()
    with fastsim.metrics() as seen:
        cross_entropy(x, y, torch.arange(len(x)), 1.0)
    found = seen.read()
    assert found.keys() == NAMES - {"alignment", "uniformity"}
    assert found["positive"] == pytest.approx((x * y).sum(1).mean().item())
