"""Losses of all pairs of the labels, and where pytorch-metric-learning's are wrong."""

import itertools

import pytest
import torch

from fastsim.integrations import dtypes
from tests.integrations import beside
from tests.integrations.metric_learning_peer import (
    CLASSES,
    PAIR_LOSSES,
    REFERENCES,
    ROWS,
    batch,
    compare,
    distances,
    losses,
    reducers,
    regularizers,
    their_losses,
)

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
    if name in ("MultiSimilarityLoss", "CircleLoss") and reducer == "classes":
        pytest.skip("theirs is wrong: test_class_weights_of_rows")
    if reducer == "anchors" and references == "others" and name == "NTXentLoss":
        pytest.skip("theirs has no place for more references than rows")
    if not is_fused(name, reducer):
        with pytest.warns(UserWarning, match=f"{name}: a reducer other than the mean"):
            getattr(losses, name)(reducer=REDUCERS[reducer]())(*batch())
    tensors = [batch()[0]]
    if references != "none":
        tensors.append(batch(ROWS if references == "the same labels" else REFERENCES, 4)[0])
    case = name, options, reducer, references
    compare(pair_call(losses, *case), pair_call(their_losses, *case), tensors)


PRODUCTS = {"distance": distances.DotProductSimilarity(normalize_embeddings=False)}


@pytest.mark.parametrize("references", ["none", "others", "the same labels"])
@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss", "MultiSimilarityLoss"])
def test_products(name, references):
    """Of rows as they are, fused: a warning that it is not would be an error."""
    options = {"MultiSimilarityLoss": {"alpha": 0.5, "beta": 0.7}}.get(name, {"temperature": 3.0})
    tensors = [batch()[0]]
    if references != "none":
        tensors.append(batch(ROWS if references == "the same labels" else REFERENCES, 4)[0])
    case = name, options | PRODUCTS, "default", references
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
        if name != "MultiSimilarityLoss":  # of which each term stands alone
            assert ours == 0
            assert (grads[0] == 0).all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_references_of_one_class(name):
    (x, labels), (y, others) = batch(), batch(REFERENCES, 4)

    def call(kind):
        given = {"ref_labels": torch.zeros_like(others)}
        return lambda x, y: getattr(kind, name)()(x, labels, ref_emb=y, **given)

    compare(call(losses), call(their_losses), [x, y])


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


SUMMED = {
    "default": lambda: None,
    "sum": reducers.SumReducer,
    "several": lambda: reducers.MultipleReducers({"loss": reducers.MeanReducer()}),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reducer", SUMMED)
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_dtype_of_the_loss(name, reducer, dtype, autocast):
    """It may depend on the reducer: several are summed in the dtype of the embeddings.

    The value is the truth of these embeddings, under autocast of those in its dtype.
    """
    x, labels = batch()
    x = x.to(dtype)
    low = torch.float16 if dtype == torch.float16 else torch.bfloat16

    def call(kind, x):
        return getattr(kind, name)(reducer=SUMMED[reducer]())(x, labels)

    with torch.autocast("cpu", low, enabled=autocast):
        ours, theirs = (call(kind, x) for kind in (losses, their_losses))
    truth = call(their_losses, (x.to(low) if autocast else x).double())
    assert ours.dtype == theirs.dtype
    eps = max(torch.finfo(ours.dtype).eps, 1e-6)
    assert abs(ours - truth) <= 2 * eps * abs(truth)


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
    # The rounding of a cosine, and 1 / temperature times that of its logit and gradient.
    allowed = 4 * torch.finfo(torch.float32).eps / 0.005
    assert abs(ours - truth) <= allowed
    wanted = torch.autograd.grad(truth, x)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], wanted, atol=allowed, rtol=0)


@pytest.mark.parametrize("name", ["MultiSimilarityLoss", "CircleLoss"])
def test_losses_of_rows_as_a_reducer_sees_them(name):
    """Theirs are a column, of which class weights make a matrix."""
    ours, theirs = (
        getattr(kind, name)(reducer=reducers.DoNothingReducer())(*batch())["loss"]
        for kind in (losses, their_losses)
    )
    assert theirs["losses"].shape == (ROWS, 1)
    torch.testing.assert_close(ours["losses"], theirs["losses"].squeeze(1))
    assert ours["reduction_type"] == theirs["reduction_type"] == "element"
    assert torch.equal(ours["indices"], theirs["indices"])


@pytest.mark.parametrize("name", ["SupConLoss", "MultiSimilarityLoss", "CircleLoss"])
def test_dtype_as_a_reducer_sees_it(name):
    """The losses of the rows are rounded only after their reduction."""
    x, labels = batch()
    ours, theirs = (
        getattr(kind, name)(reducer=reducers.DoNothingReducer())(x.bfloat16(), labels)["loss"]
        for kind in (losses, their_losses)
    )
    assert (ours["losses"].dtype, theirs["losses"].dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
def test_dtype_of_a_loss_with_a_tensor(name, monkeypatch):
    """Of shape (1,), which counts in theirs, whatever was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    x, labels = batch()
    for value in (torch.tensor([3.0]), 3.0, torch.tensor([3.0]).double()):
        ours, theirs = (
            getattr(kind, name)(temperature=value)(x.bfloat16(), labels)
            for kind in (losses, their_losses)
        )
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_dtype_without_pairs_under_autocast(name):
    """Theirs reads that there is none, and then has the dtype of the embeddings."""
    x = batch()[0][:1]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            getattr(kind, name)()(x, torch.arange(1)) for kind in (losses, their_losses)
        )
    assert ours == theirs == 0
    assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.float32)


def test_a_loss_that_is_less_than_rounding():
    """Theirs adds 1 to it before the logarithm, and AvgNonZeroReducer leaves out what is 0."""
    x, labels = torch.eye(3, 4)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 2])
    each, mean = (
        [kind.MultiSimilarityLoss(reducer=kept)(x, labels) for kind in (losses, their_losses)]
        for kept in (reducers.DoNothingReducer(), reducers.AvgNonZeroReducer())
    )
    ours, theirs = (found["loss"]["losses"].flatten() for found in each)
    assert (ours[2:] > 0).all()
    assert (theirs[2:] == 0).all()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.stack(mean), torch.stack([ours.mean(), ours[:2].mean()]))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_the_gradient_of_a_zero_row(name):
    """That of a row of length 1e-12 there; 0 here."""
    x, labels = batch()
    x[0] = 0.0
    found, wanted = (
        beside.results(lambda x, kind=kind: getattr(kind, name)()(x, labels), [x])
        for kind in (losses, their_losses)
    )
    torch.testing.assert_close([found[0], found[1][1:]], [wanted[0], wanted[1][1:]])
    assert (found[1][0] == 0).all()
    assert wanted[1][0].abs().max() > 1e9


def test_no_positive_as_a_reducer_sees_it():
    """Theirs reads that there is none."""
    ours, theirs = (
        kind.SupConLoss(reducer=reducers.DoNothingReducer())(batch()[0], torch.arange(ROWS))["loss"]
        for kind in (losses, their_losses)
    )
    assert (theirs["losses"], theirs["reduction_type"]) == (0, "already_reduced")
    assert torch.equal(ours["losses"], torch.zeros(ROWS))
    assert ours["reduction_type"] == "element"


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
