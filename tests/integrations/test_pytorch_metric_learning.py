"""The drop-in losses against pytorch-metric-learning's own: its code in float64 is the truth.

Ours may be off it by twice what theirs is in float32, and by twice what the rounding of scores does
to the truth (measure.py). A warning is an error here; cases that are not fused are in `UNFUSED`.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("pytorch_metric_learning", reason="pytorch-metric-learning is not installed")
import pytorch_metric_learning.losses as their_losses
import pytorch_metric_learning.miners as their_miners
from pytorch_metric_learning import distances, reducers, regularizers

from fastsim.integrations import overrides
from fastsim.integrations.pytorch_metric_learning import losses, miners
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

ROWS, REFERENCES, WIDTH, CLASSES = 33, 47, 12, 7


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(overrides, "_said", set())


def batch(rows=ROWS, seed=3):
    generator = fresh(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def results(call, tensors, dtype):
    """[loss, gradients] of call(*tensors) with everything floating in dtype."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    value = call(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    found = zip(grads, leaves, strict=True)
    return [value.detach(), *(torch.zeros_like(x) if g is None else g for g, x in found)]


def compare(ours, theirs, tensors):
    """ours, theirs: functions of the tensors."""
    mine = results(ours, tensors, torch.float32)
    dense = results(theirs, tensors, torch.float32)

    def exact(leaves):
        return results(theirs, leaves, torch.float64)

    truth = exact(tensors)
    moves = conditioning(exact, [t.double() for t in tensors])
    eps = torch.finfo(torch.float32).eps
    for index, (*parts, move) in enumerate(zip(mine, truth, dense, moves, strict=True)):
        assert_close(f"part {index}", *parts, torch.float32, moved=eps * move)


# ---- all pairs of the labels ----

PAIR_LOSSES = {
    "NTXentLoss": [{}, {"temperature": 0.5}],
    "SupConLoss": [{}, {"temperature": 0.5}],
    "MultiSimilarityLoss": [{}, {"alpha": 5, "beta": 20.0, "base": 0.1}],
}
REDUCERS = {
    "default": lambda: None,
    "mean": reducers.MeanReducer,
    "sum": reducers.SumReducer,
    "non-zero": reducers.AvgNonZeroReducer,
    "threshold": lambda: reducers.ThresholdReducer(low=0.3, high=50.0),
    "classes": lambda: reducers.ClassWeightedReducer(torch.linspace(0.5, 2.0, CLASSES)),
    "anchors": reducers.PerAnchorReducer,
}
PAIRED = [
    (name, options, reducer, references)
    for name, choices in PAIR_LOSSES.items()
    for options, reducer in itertools.product(choices, REDUCERS)
    for references in ("none", "others", "the same labels")
]


def is_fused(name, reducer):
    return name != "NTXentLoss" or reducer in ("default", "mean", "sum")


def pair_call(kind, name, options, reducer, references):
    def call(x, *rest):
        loss = getattr(kind, name)(**options, reducer=REDUCERS[reducer]())
        labels = batch()[1]
        if references == "none":
            return loss(x, labels)
        others = labels if references == "the same labels" else batch(REFERENCES, 4)[1]
        return loss(x, labels, ref_emb=rest[0], ref_labels=others)

    return call


@pytest.mark.parametrize(("name", "options", "reducer", "references"), PAIRED)
def test_all_pairs(name, options, reducer, references):
    if (name, reducer) == ("MultiSimilarityLoss", "classes"):
        pytest.skip("theirs is wrong: test_class_weights_of_rows")
    if reducer == "anchors" and references == "others" and name == "NTXentLoss":
        pytest.skip("theirs has no place for more references than rows")
    if not is_fused(name, reducer):
        with pytest.warns(UserWarning, match=f"{name}: a reducer of single pairs"):
            getattr(losses, name)(reducer=REDUCERS[reducer]())(*batch())
    tensors = [batch()[0]]
    if references != "none":
        tensors.append(batch(ROWS if references == "the same labels" else REFERENCES, 4)[0])
    case = name, options, reducer, references
    compare(pair_call(losses, *case), pair_call(their_losses, *case), tensors)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_regularizer(name):
    def call(kind):
        options = {"embedding_regularizer": regularizers.LpRegularizer()}
        return lambda x: getattr(kind, name)(**options, embedding_reg_weight=0.3)(x, batch()[1])

    compare(call(losses), call(their_losses), [batch()[0]])


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_without_positives_or_negatives(name):
    x = batch()[0].requires_grad_()
    for labels in (torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)):
        ours, theirs = (getattr(kind, name)()(x, labels) for kind in (losses, their_losses))
        torch.testing.assert_close(ours, theirs)
        grads = [torch.autograd.grad(value, x)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*grads)
        if name != "MultiSimilarityLoss":
            assert ours == 0
            assert (grads[0] == 0).all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_references_of_one_class(name):
    (x, labels), (y, others) = batch(), batch(REFERENCES, 4)

    def call(kind):
        given = {"ref_labels": torch.zeros_like(others)}
        return lambda x, y: getattr(kind, name)()(x, labels, ref_emb=y, **given)

    compare(call(losses), call(their_losses), [x, y])


def test_a_miner_without_positives_or_negatives():
    x = batch()[0]
    for labels in (torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)):
        ours, theirs = (kind.BatchHardMiner()(x, labels) for kind in (miners, their_miners))
        assert all(map(torch.equal, ours, theirs))


UNFUSED = {
    "listed pairs": ({}, lambda labels: {"indices_tuple": their_miners.BatchHardMiner()}),
    "float labels": ({}, lambda labels: {"labels": labels.double()}),
    "Lp distance": ({"distance": distances.LpDistance()}, lambda labels: {}),
    "plain products": (
        {"distance": distances.DotProductSimilarity(normalize_embeddings=False)},
        lambda labels: {},
    ),
    "a power": ({"distance": distances.CosineSimilarity(power=2)}, lambda labels: {}),
    "below 0": ({}, lambda labels: {}),
    "statistics": ({"distance": distances.CosineSimilarity(collect_stats=True)}, lambda labels: {}),
}


@pytest.mark.parametrize("case", UNFUSED)
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_unfused_is_theirs_and_says_so_once(name, case, recwarn):
    options, given = UNFUSED[case]
    if case == "below 0":
        options = {"alpha": -1} if name == "MultiSimilarityLoss" else {"temperature": -0.5}
    x, labels = batch()
    arguments = {"labels": labels} | given(labels)
    if "indices_tuple" in arguments:
        arguments["indices_tuple"] = arguments["indices_tuple"](x, labels)
    ours, theirs = (getattr(kind, name)(**options) for kind in (losses, their_losses))
    with pytest.warns(UserWarning, match=f"{name}: .*own code"):
        value = ours(x, **arguments)
    assert torch.equal(value, theirs(x, **arguments))
    recwarn.clear()
    assert torch.equal(ours(x, **arguments), value)
    assert not recwarn


def test_learnt_parameters():
    """A temperature is learnt without the matrix, other parameters by their code."""
    x, labels = batch()
    for name in ("NTXentLoss", "SupConLoss"):
        grads = []
        for kind in (losses, their_losses):
            value = torch.nn.Parameter(torch.tensor(0.3))
            grads.append(torch.autograd.grad(getattr(kind, name)(value)(x, labels), value)[0])
        torch.testing.assert_close(*grads)
    alpha = torch.nn.Parameter(torch.tensor(3.0))
    with pytest.warns(UserWarning, match="parameters that are tensors"):
        loss = losses.MultiSimilarityLoss(alpha)(x, labels)
    assert torch.autograd.grad(loss, alpha)[0] != 0


def test_other_names_are_theirs():
    assert losses.ArcFaceLoss is their_losses.ArcFaceLoss
    assert miners.MultiSimilarityMiner is their_miners.MultiSimilarityMiner
    x = batch()[0]
    wrapped = losses.SelfSupervisedLoss(losses.NTXentLoss())
    theirs = their_losses.SelfSupervisedLoss(their_losses.NTXentLoss())
    torch.testing.assert_close(wrapped(x, x.flip(1)), theirs(x, x.flip(1)))


# ---- what somebody has replaced ----


def harsher(kind):
    """A subclass whose loss of the pairs is twice theirs."""

    class Harsher(kind):
        def _compute_loss(self, *given):
            found = super()._compute_loss(*given)
            found["loss"]["losses"] = 2 * found["loss"]["losses"]
            return found

    return Harsher()


def other_method(kind):
    loss = kind()
    method = loss.mat_based_loss
    loss.loss_method = lambda mat, pairs: method(mat / 2, pairs)
    return loss


def own_method(kind):
    loss = kind()
    method = loss._compute_loss
    loss._compute_loss = lambda *given: method(*given)
    return loss


def own_products(kind):
    loss = kind()
    products = loss.distance.compute_mat
    loss.distance.compute_mat = lambda x, y: products(x, y) / 2
    return loss


def watched(kind):
    loss = kind()
    loss.distance.register_forward_hook(lambda module, given, out: out / 2)
    return loss


@pytest.mark.parametrize("change", [harsher, other_method, own_method, own_products, watched])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_what_was_replaced_runs(name, change):
    if (name, change) == ("NTXentLoss", other_method):
        pytest.skip("its loss of a matrix takes lists")
    x, labels = batch()
    ours, theirs = (change(getattr(kind, name)) for kind in (losses, their_losses))
    with pytest.warns(UserWarning, match="replaced; pytorch-metric-learning's own code"):
        value = ours(x, labels)
    assert torch.equal(value, theirs(x, labels))
    if change is not own_method:
        assert abs(value - getattr(losses, name)()(x, labels)) > 1e-3


def test_a_patch_of_their_distance(monkeypatch):
    x, labels = batch()
    products = distances.CosineSimilarity.compute_mat
    monkeypatch.setattr(
        distances.CosineSimilarity, "compute_mat", lambda self, x, y: products(self, x, y) / 2
    )
    with pytest.warns(UserWarning, match="compute_mat of the distance has been replaced"):
        value = losses.SupConLoss()(x, labels)
    assert torch.equal(value, their_losses.SupConLoss()(x, labels))


def test_a_miner_that_was_changed():
    x, labels = batch()
    found = []
    for kind in (miners, their_miners):
        miner = kind.BatchHardMiner()
        miner.neg_strategy = miner.EASY
        found.append(miner)
    with pytest.warns(UserWarning, match="other strategies than the hardest"):
        mined = found[0](x, labels)
    assert all(map(torch.equal, mined, found[1](x, labels)))

    class Nearest(miners.BatchHardMiner):
        def get_positives(self, mat, *given):
            return super().get_positives(-mat, *given)

    with pytest.warns(UserWarning, match="get_positives has been replaced"):
        assert not torch.equal(Nearest()(x, labels)[1], miners.BatchHardMiner()(x, labels)[1])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_dtype_of_the_loss(name, dtype, autocast):
    x, labels = batch()
    x = x.to(dtype)
    low = torch.float16 if dtype == torch.float16 else torch.bfloat16
    with torch.autocast("cpu", low, enabled=autocast):
        ours, theirs = (getattr(kind, name)()(x, labels) for kind in (losses, their_losses))
    truth = getattr(their_losses, name)()(x.double(), labels)
    assert ours.dtype == theirs.dtype
    eps = max(torch.finfo(ours.dtype).eps, 1e-6)
    assert abs(ours - truth) <= 2 * eps * abs(truth)


# ---- triplets ----

DISTANCES = {
    "default": lambda: None,
    "cosine": distances.CosineSimilarity,
    "as they are": lambda: distances.LpDistance(normalize_embeddings=False),
    "squared": lambda: distances.LpDistance(power=2),
}
OPTIONS = [{}, {"margin": 0.4, "swap": True}, {"smooth_loss": True}]
MINED = [
    (distance, options, how)
    for distance in DISTANCES
    for options in OPTIONS
    for how in ("batch hard", "references", "sampled")
    if not (how == "references" and "swap" in options)
]


def triplet_call(kind, mine, distance, options, how):
    def call(x, *rest):
        labels = batch()[1]
        if how == "sampled":
            torch.manual_seed(0)
            loss = kind.TripletMarginLoss(
                distance=DISTANCES[distance](), triplets_per_anchor=3, **options
            )
            return loss(x, labels)
        loss = kind.TripletMarginLoss(distance=DISTANCES[distance](), **options)
        references = {}
        if how == "references":
            references = {"ref_emb": rest[0], "ref_labels": batch(REFERENCES, 4)[1]}
        miner = mine.BatchHardMiner(distance=DISTANCES[distance]())
        return loss(x, labels, miner(x, labels, **references), **references)

    return call


@pytest.mark.parametrize(("distance", "options", "how"), MINED)
def test_triplets(distance, options, how):
    tensors = [batch()[0]] + ([batch(REFERENCES, 4)[0]] if how == "references" else [])
    case = distance, options, how
    ours = triplet_call(losses, miners, *case)
    compare(ours, triplet_call(their_losses, their_miners, *case), tensors)


def test_all_triplets_are_theirs():
    x, labels = batch()
    with pytest.warns(UserWarning, match="all triplets of a batch"):
        value = losses.TripletMarginLoss()(x, labels)
    assert torch.equal(value, their_losses.TripletMarginLoss()(x, labels))


def test_too_many_triplets_are_theirs(monkeypatch):
    monkeypatch.setattr(losses, "FEW", 0)
    x, labels = batch()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="more triplets than"):
        value = losses.TripletMarginLoss(triplets_per_anchor=100)(x, labels)
    torch.manual_seed(0)
    assert torch.equal(value, their_losses.TripletMarginLoss(triplets_per_anchor=100)(x, labels))


POWERS = [
    (distances.LpDistance, 2, True),
    (distances.LpDistance, 0.5, True),
    (distances.LpDistance, -1, False),
    (distances.CosineSimilarity, 1, True),
    (distances.CosineSimilarity, 2, False),
    (distances.DotProductSimilarity, 2, False),
]


@pytest.mark.parametrize(("kind", "power", "fused"), POWERS)
def test_miner_of_a_power(kind, power, fused, recwarn):
    """One that changes which pair is the hardest is theirs."""
    x, labels = batch()
    ours, theirs = (
        package.BatchHardMiner(distance=kind(power=power))(x, labels)
        for package in (miners, their_miners)
    )
    assert all(map(torch.equal, ours, theirs))
    said = [str(warning.message) for warning in recwarn]
    assert [f"to the power of {power};" in text for text in said] == [] if fused else [True]


def test_miner_of_ranges_is_theirs():
    x, labels = batch()
    options = {"allowed_neg_range": [0.1, 1.2]}
    with pytest.warns(UserWarning, match="allowed ranges"):
        ours = miners.BatchHardMiner(**options)(x, labels)
    theirs = their_miners.BatchHardMiner(**options)(x, labels)
    assert all(map(torch.equal, ours, theirs))


# ---- a memory of past embeddings ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [20, 24, 100])
@pytest.mark.parametrize("name", [*PAIR_LOSSES, "TripletMarginLoss"])
def test_memory(name, size, masked):
    """Batches of 8 into a memory that never fills, fills exactly, and wraps around."""
    steps = [batch(8, seed) for seed in range(6)]

    def call(kind, mine):
        def run(*xs):
            miner = mine.BatchHardMiner() if name == "TripletMarginLoss" else None
            loss = getattr(kind, name)()
            kept = kind.CrossBatchMemory(loss, WIDTH, memory_size=size, miner=miner)
            mask = torch.arange(8) < 3 if masked else None
            total = [
                kept(x, labels, enqueue_mask=mask) for x, (_, labels) in zip(xs, steps, strict=True)
            ]
            return sum(total)

        return run

    tensors = [x for x, _ in steps]
    compare(call(losses, miners), call(their_losses, their_miners), tensors)


def test_memory_of_what_is_not_fused_lists_its_pairs():
    x, labels = batch(8)
    options = {"distance": distances.LpDistance()}
    kept = losses.CrossBatchMemory(losses.NTXentLoss(**options), WIDTH, memory_size=32)
    theirs = their_losses.CrossBatchMemory(
        their_losses.NTXentLoss(**options), WIDTH, memory_size=32
    )
    with pytest.warns(UserWarning, match="only all pairs of the labels"):
        value = kept(x, labels)
    assert torch.equal(value, theirs(x, labels))


MEMORY = """
import resource, sys, torch
from fastsim.integrations.pytorch_metric_learning import losses, miners

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(rows):
    x = torch.randn(rows, 64, requires_grad=True)
    labels = torch.arange(rows) // 2
    before = peak()
    mined = [miners.BatchHardMiner()(x, labels)] if "Triplet" in sys.argv[1] else []
    getattr(losses, sys.argv[1])()(x, labels, *mined).backward()
    return peak() - before

run(256)
print(run(8192))
"""


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "TripletMarginLoss"])
def test_no_matrix(name, usable):
    """The rise of the peak in a fresh process, MB: an 8192 x 8192 float32 matrix is 256."""
    usable("cpu")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, name],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 100


# ---- few pairs ----


@pytest.mark.parametrize("others", [[0, 1], [0, 0], [1, 1], [0], [1], [0, 1, 1]])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_few_pairs(name, others):
    """Theirs is 0 where there is one positive pair and one negative at most."""
    others = torch.tensor(others)
    x, y = batch(1)[0], batch(len(others), 4)[0]

    def call(kind):
        labels = torch.tensor([0])
        return lambda x, y: getattr(kind, name)()(x, labels, ref_emb=y, ref_labels=others)

    if others.tolist() == [0, 1]:
        assert call(their_losses)(x, y) == 0
    compare(call(losses), call(their_losses), [x, y])


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_few_pairs_of_a_memory(name):
    """Of a batch that is not itself in the memory."""
    x, labels = batch(3)[0], torch.tensor([0, 0, 1])
    mask = torch.tensor([True, False, True])

    def call(kind):
        kept = kind.CrossBatchMemory(getattr(kind, name)(), WIDTH, memory_size=8)
        return lambda x: kept(x, labels, enqueue_mask=mask)

    assert call(losses)(x) == call(their_losses)(x) == 0


# ---- where theirs is wrong ----


def test_nt_xent_does_not_saturate():
    """Theirs takes the logarithm of a quotient that has become 0: 87 at most, and no gradient."""
    x = torch.eye(4)[[0, 0, 1, 1]].mul(torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None])
    x = (x + 0.01 * batch(4)[0][:, :4]).requires_grad_()
    labels = torch.tensor([0, 0, 1, 1])
    ours, theirs = (
        kind.NTXentLoss(temperature=0.005)(x, labels) for kind in (losses, their_losses)
    )
    truth = their_losses.NTXentLoss(temperature=0.005)(x.double(), labels)
    assert theirs < 88 < truth
    assert torch.autograd.grad(theirs, x)[0].abs().max() == 0
    torch.testing.assert_close(ours.double(), truth)
    wanted = torch.autograd.grad(truth, x)[0]
    # The rounding of a cosine, and 1 / temperature times that of its logit and gradient.
    allowed = 4 * torch.finfo(torch.float32).eps / 0.005
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], wanted, atol=allowed, rtol=0)


def test_class_weights_of_rows():
    """Theirs multiplies a column of losses by a row of weights: every loss by every weight."""
    x, labels = batch()
    weights = torch.linspace(0.1, 5.0, CLASSES)
    each = their_losses.MultiSimilarityLoss(reducer=reducers.DoNothingReducer())
    of_rows = each(x, labels)["loss"]["losses"].squeeze(1)
    wanted = (of_rows * weights[labels]).mean()
    ours, theirs = (
        kind.MultiSimilarityLoss(reducer=reducers.ClassWeightedReducer(weights))(x, labels)
        for kind in (losses, their_losses)
    )
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(theirs, of_rows.mean() * weights[labels].mean())
    assert abs(theirs - wanted) > 1000 * torch.finfo(torch.float32).eps * wanted


def test_swap_with_references():
    """Theirs looks for the positive among the embeddings, of which it is none."""
    (x, _), (y, _) = batch(5), batch(5, 4)
    triplets = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 0]), torch.tensor([1, 0, 4])
    distance = {"distance": distances.LpDistance(normalize_embeddings=False)}
    wanted = [
        torch.relu((x[a] - y[p]).norm() - min((x[a] - y[n]).norm(), (y[p] - y[n]).norm()) + 3.0)
        for a, p, n in zip(*triplets, strict=True)
    ]
    ours, theirs = (
        kind.TripletMarginLoss(margin=3.0, swap=True, reducer=reducers.MeanReducer(), **distance)(
            x, None, triplets, ref_emb=y
        )
        for kind in (losses, their_losses)
    )
    torch.testing.assert_close(ours, torch.stack(wanted).mean())
    assert abs(theirs - ours) > 0.01


def test_memory_of_single_rows():
    """Theirs keeps the pair of a single row with itself, as its positive."""
    kept, theirs = (
        kind.CrossBatchMemory(kind.NTXentLoss(temperature=1.0), WIDTH, memory_size=8)
        for kind in (losses, their_losses)
    )
    for seed in range(3):
        x, labels = batch(1, seed)[0].requires_grad_(), torch.tensor([seed])
        ours, peer = kept(x, labels), theirs(x, labels)
        assert ours == 0  # no class has come twice
    assert peer > 0
