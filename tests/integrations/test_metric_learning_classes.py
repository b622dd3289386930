"""Losses against a weight row of each class, and where pytorch-metric-learning's code runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsim.integrations import dtypes
from tests.integrations.metric_learning_peer import (
    CLASSES,
    ROWS,
    WIDTH,
    batch,
    compare,
    distances,
    double,
    losses,
    reducers,
    regularizers,
    their_losses,
    their_miners,
)
from tests.seeds import fresh

PRODUCTS = {"distance": distances.DotProductSimilarity(normalize_embeddings=False)}
CLASS_LOSSES = {
    "NormalizedSoftmaxLoss": [{}, {"temperature": 0.3}, {"temperature": 4.0, **PRODUCTS}],
    "CosFaceLoss": [{}, {"margin": 0.1, "scale": 20.0}],
    "ArcFaceLoss": [{}, {"margin": 60.0, "scale": 20}],
    "ProxyNCALoss": [
        {},
        {"softmax_scale": 8},
        {"softmax_scale": 8.0, "distance": distances.CosineSimilarity()},
        PRODUCTS,
    ],
    "ProxyAnchorLoss": [{}, {"margin": 0.3, "alpha": 8.0}, {"alpha": 2, **PRODUCTS}],
}
REDUCERS = {
    "default": lambda: None,
    "sum": reducers.SumReducer,
    "non-zero": reducers.AvgNonZeroReducer,
    "classes": lambda: reducers.ClassWeightedReducer(torch.linspace(0.5, 2.0, CLASSES)),
}
MINERS = {
    "all rows": None,
    "triplets": their_miners.BatchHardMiner,
    "pairs": their_miners.MultiSimilarityMiner,
}


def class_rows(name):
    """Weights as the loss of that name keeps them."""
    rows = torch.randn(CLASSES, WIDTH, generator=fresh(5))
    return rows if learnt(name) == "proxies" else rows.T.contiguous()


def made(kind, name, **options):
    return getattr(kind, name)(CLASSES, WIDTH, **options)


def learnt(name):
    return "proxies" if name.startswith("Proxy") else "W"


def with_rows(loss, rows):
    """The loss with these weights in the place of its own."""
    name = learnt(type(loss).__name__)
    delattr(loss, name)
    setattr(loss, name, rows)
    return loss


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in CLASS_LOSSES for options in CLASS_LOSSES[name]],
)
def test_class_losses(name, options, reducer, miner):
    x, labels = batch()
    named = None if MINERS[miner] is None else MINERS[miner]()(x, labels)

    def call(kind):
        def value(x, rows):
            loss = with_rows(made(kind, name, reducer=REDUCERS[reducer](), **options), rows)
            return loss(x, labels, named)

        return value

    compare(call(losses), call(their_losses), [x, class_rows(name)])


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_classes_without_rows(name):
    x, labels = batch()

    def call(kind):
        return lambda x, rows: with_rows(made(kind, name), rows)(x, labels % 3)

    compare(call(losses), call(their_losses), [x, class_rows(name)])


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_regularizers(name):
    x, labels = batch()

    def call(kind):
        options = {"weight_regularizer": regularizers.LpRegularizer(), "weight_reg_weight": 0.3}
        options["embedding_regularizer"] = regularizers.LpRegularizer()
        return lambda x, rows: with_rows(made(kind, name, **options), rows)(x, labels)

    compare(call(losses), call(their_losses), [x, class_rows(name)])


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operation returns within the block."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, torch.Tensor):
                self.numbers = max(self.numbers, value.numel())
        return found


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_no_matrix_of_rows_and_classes(name):
    rows, classes = 300, 400
    x = torch.randn(rows, 4, generator=fresh(6))
    labels = torch.randint(0, classes, (rows,), generator=fresh(7))
    seen = []
    for kind in (losses, their_losses):
        loss = getattr(kind, name)(classes, 4)
        with Largest() as largest:
            loss(x.clone().requires_grad_(), labels).backward()
        seen.append(largest.numbers)
    ours, theirs = seen
    assert ours < rows * classes / 10
    assert theirs >= rows * classes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_dtype_and_random_numbers(name, dtype):
    """To ask theirs for its dtype draws no random numbers."""
    x, labels = batch()
    ours, theirs = (made(kind, name) for kind in (losses, their_losses))
    before = torch.get_rng_state()
    value = ours(x.to(dtype), labels)
    assert torch.equal(torch.get_rng_state(), before)
    assert value.dtype == theirs(x.to(dtype), labels).dtype
    assert getattr(ours, learnt(name)).dtype == dtype  # as theirs casts it


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_what_is_learnt_keeps_its_names(name):
    ours, theirs = (made(kind, name) for kind in (losses, their_losses))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, labels = batch()
    torch.testing.assert_close(ours(x, labels), theirs(x, labels))
    assert torch.equal(ours.get_logits(x), theirs.get_logits(x))


def smooth(loss):
    loss.cross_entropy = torch.nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)


def watched(loss):
    loss.distance.register_forward_hook(lambda module, given, out: out / 2)


def halved(loss):
    method = "nca_computation" if hasattr(loss, "nca_computation") else "get_logits"
    method = "scale_logits" if hasattr(loss, "scale_logits") else method
    shipped = getattr(loss, method)

    def half(*given):
        found = shipped(*given)
        if isinstance(found, dict):
            found["loss"]["losses"] = found["loss"]["losses"] / 2
            return found
        return found / 2

    setattr(loss, method, half)


@pytest.mark.parametrize("change", [smooth, watched, halved])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_what_was_replaced_runs(name, change, recwarn):
    if name.startswith("Proxy") and change is smooth:
        pytest.skip("it has no cross entropy")
    x, labels = batch()
    ours, theirs, plain = (made(kind, name) for kind in (losses, their_losses, losses))
    for loss in (ours, theirs):
        change(loss)
    for loss in (ours, plain):
        loss.load_state_dict(theirs.state_dict())
    with pytest.warns(UserWarning, match="replaced; pytorch-metric-learning's own code"):
        value = ours(x, labels)
    assert torch.equal(value, theirs(x, labels))
    assert abs(value - plain(x, labels)) > 1e-3
    recwarn.clear()
    assert torch.equal(ours(x, labels), value)
    assert not recwarn


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_a_patch_of_their_method(name, monkeypatch):
    (x, labels), kind = batch(), getattr(their_losses, name)
    ours, theirs = (made(kind, name) for kind in (losses, their_losses))
    ours.load_state_dict(theirs.state_dict())
    double(kind, monkeypatch)
    with pytest.warns(UserWarning, match="compute_loss has been replaced"):
        value = ours(x, labels)
    assert torch.equal(value, theirs(x, labels))


def test_a_margin_of_ones_own():
    """How ArcFaceLoss moves the cosine of a row with its class is asked of the method itself."""
    x, labels = batch()

    def further(kind):
        class Further(kind.ArcFaceLoss):
            def modify_cosine_of_target_classes(self, cosines):
                return super().modify_cosine_of_target_classes(cosines) - 0.1

        Further.__name__ = "ArcFaceLoss"
        return lambda x, rows: with_rows(Further(CLASSES, WIDTH), rows)(x, labels)

    compare(further(losses), further(their_losses), [x, class_rows("ArcFaceLoss")])


UNFUSED = {
    "distances": ("ProxyNCALoss", {"distance": distances.LpDistance(power=1)}),
    "squares of rows as they are": (
        "ProxyNCALoss",
        {"distance": distances.LpDistance(power=2, normalize_embeddings=False)},
    ),
    "a power": ("ArcFaceLoss", {"distance": distances.CosineSimilarity(power=2)}),
    "below 0": ("NormalizedSoftmaxLoss", {"temperature": -0.5}),
    "a scale of 0": ("CosFaceLoss", {"scale": 0}),
    "a margin to learn": ("CosFaceLoss", {"margin": torch.tensor(0.3)}),
    "statistics": ("CosFaceLoss", {"collect_stats": True}),
}


@pytest.mark.parametrize("case", UNFUSED)
def test_unfused_is_theirs(case):
    name, options = UNFUSED[case]
    x, labels = batch()
    ours, theirs = (made(kind, name, **options) for kind in (losses, their_losses))
    ours.load_state_dict(theirs.state_dict())
    with pytest.warns(UserWarning, match=f"{name}: .*own code"):
        value = ours(x, labels)
    assert torch.equal(value, theirs(x, labels))


@pytest.mark.parametrize("name", ["alpha", "margin"])
def test_proxies_without_numbers(name):
    x, labels = batch()
    options = {name: torch.tensor(0.5)}
    ours, theirs = (made(kind, "ProxyAnchorLoss", **options) for kind in (losses, their_losses))
    ours.load_state_dict(theirs.state_dict())
    with pytest.warns(UserWarning, match="parameters that are not numbers"):
        assert torch.equal(ours(x, labels), theirs(x, labels))


def test_one_class():
    x, labels = batch()[0], torch.zeros(ROWS, dtype=torch.long)
    ours, theirs = (kind.ArcFaceLoss(1, WIDTH) for kind in (losses, their_losses))
    with pytest.warns(UserWarning, match="a single class has no fused form"):
        assert ours(x, labels) == theirs(x, labels) == 0
    assert losses.CosFaceLoss(1, WIDTH)(x, labels) == 0


def test_learnt_numbers():
    """A temperature and a scale are learnt without the matrix."""
    x, labels = batch()
    for name, option in (("NormalizedSoftmaxLoss", "temperature"), ("ArcFaceLoss", "scale")):

        def call(kind, name=name, option=option):
            return lambda x, rows, number: with_rows(made(kind, name, **{option: number}), rows)(
                x, labels
            )

        tensors = [x, class_rows(name), torch.tensor(0.5)]
        compare(call(losses), call(their_losses), tensors)


NUMBERS = [
    ("CosFaceLoss", "scale"),
    ("ArcFaceLoss", "scale"),
    ("ProxyNCALoss", "softmax_scale"),
    ("NormalizedSoftmaxLoss", "temperature"),
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_the_dtype_of_a_loss_with_a_tensor(name, option, monkeypatch):
    """Of shape (1,), which counts in theirs, whatever was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    x, labels = batch()
    for value in (torch.tensor([3.0]), 3.0, torch.tensor([3.0]).double()):
        ours, theirs = (
            made(kind, name, **{option: value})(x.bfloat16(), labels)
            for kind in (losses, their_losses)
        )
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_number_of_16_bits(name, option):
    """Its inverse is not rounded to 16 bits."""
    x, labels = batch()
    options = {option: torch.tensor(0.3 if option == "temperature" else 30.2).bfloat16()}

    def call(kind):
        return lambda x, rows: with_rows(made(kind, name, **options), rows)(x, labels)

    compare(call(losses), call(their_losses), [x, class_rows(name)])


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_what_theirs_refuses(name):
    (x, labels), loss = batch(), made(losses, name)
    with pytest.raises(ValueError, match="labels"):
        loss(x)
    with pytest.raises(ValueError, match="ref_emb"):
        loss(x, labels, ref_emb=x.clone(), ref_labels=labels)
    with pytest.raises(ValueError, match=rf"labels: wanted .*{CLASSES}"):
        loss(x, labels + CLASSES)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_labels_of_other_dtypes(name, dtype):
    """Bytes are no mask, even if there are as many rows as classes."""
    x, labels = batch(CLASSES)
    labels, loss = labels.clamp(min=1), made(losses, name)
    assert torch.equal(loss(x, labels.to(dtype)), loss(x, labels))
    if dtype == torch.int32 and name != "ProxyNCALoss":
        with pytest.raises(RuntimeError):
            made(their_losses, name)(x, labels.to(dtype))


def test_proxies_leave_out_labels_of_no_class():
    """In their ProxyNCALoss; refused in ours."""
    x, labels = batch()
    labels[:3] = torch.tensor([CLASSES, -1, CLASSES])
    loss = made(their_losses, "ProxyNCALoss")
    torch.testing.assert_close(loss(x, labels), loss(x[3:], labels[3:]))
    with pytest.raises(ValueError, match=rf"labels: wanted .*{CLASSES}"):
        made(losses, "ProxyNCALoss")(x, labels)


def test_a_probability_that_rounds_to_zero():
    """ProxyNCALoss of theirs leaves such a row out; its loss is the largest of all."""
    proxies = torch.eye(2, WIDTH)
    x, labels = torch.eye(2, WIDTH)[[0, 0]], torch.tensor([0, 1])
    ours, theirs = (
        with_rows(kind.ProxyNCALoss(2, WIDTH, softmax_scale=100.0), proxies)(x, labels)
        for kind in (losses, their_losses)
    )
    assert theirs == 0
    torch.testing.assert_close(ours, torch.tensor(100.0))  # the mean of 0 and 200
