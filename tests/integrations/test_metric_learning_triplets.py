"""The triplet loss and the miner of the hardest pairs."""

import pytest
import torch

from tests.integrations.metric_learning_peer import (
    REFERENCES,
    ROWS,
    batch,
    compare,
    distances,
    losses,
    miners,
    reducers,
    their_losses,
    their_miners,
)

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
    for how in ("batch hard", "references", "the same labels", "sampled")
    if how in ("batch hard", "sampled") or "swap" not in options
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
        if rest:
            # Of the same labels, theirs leaves out the pair of a row with the reference in its
            # place, which may be the farthest of its class.
            others = labels if how == "the same labels" else batch(REFERENCES, 4)[1]
            references = {"ref_emb": rest[0], "ref_labels": others}
        miner = mine.BatchHardMiner(distance=DISTANCES[distance]())
        return loss(x, labels, miner(x, labels, **references), **references)

    return call


@pytest.mark.parametrize(("distance", "options", "how"), MINED)
def test_triplets(distance, options, how):
    tensors, rows = [batch()[0]], {"references": REFERENCES, "the same labels": ROWS}
    if how in rows:
        tensors.append(batch(rows[how], 4)[0])
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
    with pytest.warns(UserWarning, match="the triplets need more memory"):
        value = losses.TripletMarginLoss(triplets_per_anchor=100)(x, labels)
    torch.manual_seed(0)
    assert torch.equal(value, their_losses.TripletMarginLoss(triplets_per_anchor=100)(x, labels))


def test_swap_with_references():
    """Theirs looks for the positive among the embeddings, of which it is none."""
    (x, _), (y, _) = batch(5), batch(5, 4)
    y[1] = y[3] + 0.01  # the first negative: nearer to its positive than to any other
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


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("power", [0.5, -1, 1, 2])
def test_a_power_of_distance_0(power, normalized):
    """Finite gradients, as theirs, of a positive like the anchor and of one as its own negative."""
    x = batch(4)[0].double()
    x[1] = x[0]
    triplets = torch.tensor([0, 2, 3]), torch.tensor([1, 3, 2]), torch.tensor([2, 0, 3])
    found = []
    for kind in (losses, their_losses):
        distance = distances.LpDistance(power=power, normalize_embeddings=normalized)
        leaf = x.clone().requires_grad_()
        value = kind.TripletMarginLoss(margin=5.0, distance=distance)(leaf, None, triplets)
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(*found)


def assert_same(ours, theirs):
    """What two miners name: anchors, positives and negatives."""
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_a_miner_without_positives_or_negatives():
    x = batch()[0]
    for labels in (torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)):
        ours, theirs = (kind.BatchHardMiner()(x, labels) for kind in (miners, their_miners))
        assert_same(ours, theirs)


@pytest.mark.parametrize("kind", [distances.CosineSimilarity, distances.LpDistance])
def test_a_miner_names_rows_with_a_nan(kind):
    """As theirs, so that the loss of the triplets shows it."""
    x, labels = batch()
    x[ROWS // 2, 1] = torch.nan
    ours, theirs = (
        package.BatchHardMiner(distance=kind())(x, labels) for package in (miners, their_miners)
    )
    assert_same(ours, theirs)


def test_a_miner_that_was_changed():
    x, labels = batch()
    found = []
    for kind in (miners, their_miners):
        miner = kind.BatchHardMiner()
        miner.neg_strategy = miner.EASY
        found.append(miner)
    with pytest.warns(UserWarning, match="other strategies than the hardest"):
        mined = found[0](x, labels)
    assert_same(mined, found[1](x, labels))

    class Nearest(miners.BatchHardMiner):
        def get_positives(self, mat, *given):
            return super().get_positives(-mat, *given)

    with pytest.warns(UserWarning, match="get_positives has been replaced"):
        assert not torch.equal(Nearest()(x, labels)[1], miners.BatchHardMiner()(x, labels)[1])


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
    assert_same(ours, theirs)
    said = [str(warning.message) for warning in recwarn]
    assert [f"to the power of {power};" in text for text in said] == [] if fused else [True]


def test_miner_of_ranges_is_theirs():
    x, labels = batch()
    options = {"allowed_neg_range": [0.1, 1.2]}
    with pytest.warns(UserWarning, match="allowed ranges"):
        ours = miners.BatchHardMiner(**options)(x, labels)
    theirs = their_miners.BatchHardMiner(**options)(x, labels)
    assert_same(ours, theirs)


def test_few_rows_of_bfloat16():
    """Of which torch computes no matrix of distances."""
    (x, labels), found = batch(9), []
    for given in (x.bfloat16(), x.bfloat16().double()):
        mined = miners.BatchHardMiner()(given, labels)
        found.append(losses.TripletMarginLoss()(given, labels, mined))
    torch.testing.assert_close(found[0], found[1].bfloat16())
    for call in (their_miners.BatchHardMiner(), their_losses.TripletMarginLoss()):
        with pytest.raises(RuntimeError, match="BFloat16"):
            call(x.bfloat16(), labels)
