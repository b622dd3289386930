"""What is not fused or has been replaced runs pytorch-metric-learning's code, and says so once."""

import pytest
import torch

from tests.integrations.metric_learning_peer import (
    PAIR_LOSSES,
    batch,
    distances,
    double,
    losses,
    miners,
    their_losses,
    their_miners,
)

UNFUSED = {
    "listed pairs": ({}, lambda labels: {"indices_tuple": their_miners.BatchHardMiner()}),
    "float labels": ({}, lambda labels: {"labels": labels.double()}),
    "Lp distance": ({"distance": distances.LpDistance()}, lambda labels: {}),
    "rows of another norm": ({"distance": distances.DotProductSimilarity(p=1)}, lambda labels: {}),
    "a power of products": (
        {"distance": distances.DotProductSimilarity(normalize_embeddings=False, power=2)},
        lambda labels: {},
    ),
    "a power": ({"distance": distances.CosineSimilarity(power=2)}, lambda labels: {}),
    "below 0": ({}, lambda labels: {}),
    "statistics": ({"distance": distances.CosineSimilarity(collect_stats=True)}, lambda labels: {}),
}


OTHERS = distances.LpDistance, distances.DotProductSimilarity


@pytest.mark.parametrize("case", UNFUSED)
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_unfused_is_theirs_and_says_so_once(name, case, recwarn):
    options, given = UNFUSED[case]
    if case == "below 0":
        below = {"MultiSimilarityLoss": {"alpha": -1}, "CircleLoss": {"gamma": -1}}
        options = below.get(name, {"temperature": -0.5})
    if name == "CircleLoss" and type(options.get("distance")) in OTHERS:
        pytest.skip("its distance is the cosine")
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
    theirs = their_losses.MultiSimilarityLoss(alpha)(x, labels)
    assert torch.autograd.grad(loss, alpha) == torch.autograd.grad(theirs, alpha)


def test_other_names_are_theirs():
    assert losses.SoftTripleLoss is their_losses.SoftTripleLoss
    assert miners.MultiSimilarityMiner is their_miners.MultiSimilarityMiner
    x = batch()[0]
    wrapped = losses.SelfSupervisedLoss(losses.NTXentLoss())
    theirs = their_losses.SelfSupervisedLoss(their_losses.NTXentLoss())
    torch.testing.assert_close(wrapped(x, x.flip(1)), theirs(x, x.flip(1)))


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


@pytest.mark.parametrize("name", ["op", "on", "delta_p", "delta_n"])
def test_a_circle_of_another_optimum(name):
    x, labels = batch()
    ours, theirs = (kind.CircleLoss() for kind in (losses, their_losses))
    for loss in (ours, theirs):
        setattr(loss, name, getattr(loss, name) + 0.05)
    with pytest.warns(UserWarning, match=f"{name} has been replaced"):
        value = ours(x, labels)
    assert torch.equal(value, theirs(x, labels))


def test_a_circle_without_its_numbers():
    x, labels = batch()
    ours, theirs = (kind.CircleLoss(gamma=torch.tensor(20.0)) for kind in (losses, their_losses))
    with pytest.warns(UserWarning, match="parameters that are not numbers"):
        assert torch.equal(ours(x, labels), theirs(x, labels))
    ours, theirs = (kind.CircleLoss() for kind in (losses, their_losses))
    for loss in (ours, theirs):
        loss.soft_plus = torch.nn.Softplus(beta=2)
    with pytest.warns(UserWarning, match="soft_plus has been replaced"):
        assert torch.equal(ours(x, labels), theirs(x, labels))


@pytest.mark.parametrize("name", [*PAIR_LOSSES, "TripletMarginLoss"])
def test_a_patch_of_a_method_that_ours_overrides(name, monkeypatch):
    (x, labels), kind = batch(), getattr(their_losses, name)
    mined = [their_miners.BatchHardMiner()(x, labels)] if name == "TripletMarginLoss" else []
    double(kind, monkeypatch)
    with pytest.warns(UserWarning, match="compute_loss has been replaced"):
        value = getattr(losses, name)()(x, labels, *mined)
    assert torch.equal(value, kind()(x, labels, *mined))


def test_a_patch_of_the_memory_or_the_miner(monkeypatch):
    x, labels = batch(8)
    monkeypatch.setattr(their_losses.CrossBatchMemory, "create_indices_tuple", lambda *given: None)
    kept = losses.CrossBatchMemory(losses.SupConLoss(), x.shape[1], memory_size=32)
    assert kept.create_indices_tuple(x, labels, x, labels, None, True) is None
    monkeypatch.setattr(their_miners.BatchHardMiner, "mine", lambda *given: "patched")
    with pytest.warns(UserWarning, match="mine has been replaced"):
        assert miners.BatchHardMiner().mine(x, labels, x, labels) == "patched"


def test_a_patch_of_their_distance(monkeypatch):
    x, labels = batch()
    products = distances.CosineSimilarity.compute_mat
    monkeypatch.setattr(
        distances.CosineSimilarity, "compute_mat", lambda self, x, y: products(self, x, y) / 2
    )
    with pytest.warns(UserWarning, match="compute_mat of the distance has been replaced"):
        value = losses.SupConLoss()(x, labels)
    assert torch.equal(value, their_losses.SupConLoss()(x, labels))
