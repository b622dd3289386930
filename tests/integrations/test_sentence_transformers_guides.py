"""Drop-in losses of sentence-transformers with a guide, and with what somebody replaced in them."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.backends import get
from fastsim.backends.extras import GUIDE
from fastsim.engine import log_sum_exp
from fastsim.integrations import sentence_transformers as ours
from tests.integrations.sentence_transformers_peer import (
    RUNS,
    Given,
    Guided,
    hold,
    scaled,
    tokenizer,
    vectors,
)
from tests.models import WORDS


def gist(package, name, columns, guides, options, dtype):
    loss = getattr(package, name)(Given(), Guided(), **options).to(dtype)
    leaves = [column.detach().to(dtype).requires_grad_() for column in columns]
    batch = [
        {"embeddings": leaf, "guide": guide.to(dtype), "input_ids": torch.zeros(len(leaf), 2)}
        for leaf, guide in zip(leaves, guides, strict=True)
    ]
    value = loss(batch, None)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("flat", [False, True], ids=["padded", "in one row"])
def test_a_guide_of_another_tokenizer_is_given_the_texts(flat):
    """Without the special tokens of the model's tokenizer."""
    words = [word for word in WORDS if word.isalpha()]
    texts = [" ".join(words[:3]), words[3]]
    feature = dict(tokenizer()(texts, padding=True, return_tensors="pt"))
    if flat:
        rows = [row for text in texts for row in tokenizer()(text)["input_ids"]]
        ends = [0, len(tokenizer()(texts[0])["input_ids"]), len(rows)]
        feature = {"input_ids": torch.tensor([rows]), "cu_seq_lens_q": torch.tensor(ends)}
    guide = SimpleNamespace(preprocess=lambda given: {"given": given}, device="cpu")
    stand_in = SimpleNamespace(tokenizer=tokenizer(), guide=guide)
    assert ours.GISTEmbedLoss._retokenized(stand_in, feature)["given"] == texts


def same_gist(name, options, columns, guides):
    runs = [gist(package, name, columns, guides, options, dtype) for package, dtype in RUNS]
    hold(f"{name} {options}", runs, 1 / options.get("temperature", 0.01))


def decided(guides, margin):
    """Whether no guide cosine lies at its threshold, where rounding would decide."""
    units = [torch.nn.functional.normalize(g.double(), dim=1) for g in guides]
    own = (units[0] * units[1]).sum(1)
    gaps = []
    for bound in (own - margin, own - own.abs() * margin):
        for x, y in itertools.product(units[:2], units):
            gap = (x @ y.T - bound[:, None]).abs()
            gaps.append(gap.masked_fill(gap < 1e-12, 1.0).min())
    return min(gaps) > 1e-6


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("negatives", [0, 1])
@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
def test_gist(name, negatives, strategy):
    grid = itertools.product((0.0, 0.1, -0.2), (True, False), (True, False), (0.01, 0.5))
    for margin, anchors, positives, temperature in grid:
        columns = scaled(vectors(2 + negatives))
        guides = vectors(2 + negatives, width=7)
        while not decided(guides, margin):
            guides = vectors(2 + negatives, width=7)
        options = {
            "margin_strategy": strategy,
            "margin": margin,
            "contrast_anchors": anchors,
            "contrast_positives": positives,
            "temperature": temperature,
        }
        same_gist(name, options, columns, guides)


def test_gist_keeps_copies_of_the_positive():
    """A tie with the threshold is no false negative, whatever the order of the sums."""
    columns, guides = vectors(3, 70), vectors(3, 70, width=37)
    for column in guides[1:]:
        column[:] = guides[1][torch.arange(70) % 3]
    guides[0][:] = guides[0][torch.arange(70) % 2]
    same_gist("GISTEmbedLoss", {"temperature": 0.1}, columns, guides)


@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
def test_gist_asks_one_backend(name, monkeypatch):
    """For thresholds what serves the scores, though another is first among those without guides."""
    asked = []
    cosines = log_sum_exp._guide_cosines

    def noted(rows, columns, backend):
        asked.append(backend)
        return cosines(rows, columns, backend)

    monkeypatch.setattr(log_sum_exp, "_guide_cosines", noted)
    monkeypatch.setattr(type(get("cpu")), "extras", get("cpu").extras - {GUIDE})
    gist(ours, name, vectors(3), vectors(3, width=7), {}, torch.float32)
    assert asked == ["torch"]


@pytest.mark.parametrize("name", ["GISTEmbedLoss", "CachedGISTEmbedLoss"])
@pytest.mark.parametrize("of_guide", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gist_takes_a_guide_of_another_dtype(name, dtype, of_guide):
    """As if it were the model's; copies of a positive are kept."""
    columns, guides = vectors(3, 70), vectors(3, 70, width=37)
    for column in guides[1:]:
        column[:] = guides[1][torch.arange(70) % 3]
    loss = getattr(ours, name)(Given(), Guided())
    embeddings = [column.to(dtype) for column in columns]

    def value(guides):
        if name == "GISTEmbedLoss":
            return loss.compute_loss_from_embeddings(embeddings, None, guides)
        return loss.calculate_loss([[e] for e in embeddings], [[g] for g in guides])

    found = value([guide.to(of_guide) for guide in guides])
    assert torch.equal(found, value([guide.to(dtype) for guide in guides]))


def test_cached_gist_takes_several_negatives():
    guides = vectors(5, width=7)
    same_gist("CachedGISTEmbedLoss", {"mini_batch_size": 4}, vectors(5), guides)
    with pytest.raises(ValueError, match="Expected 2 to 3 embeddings, got 5"):
        gist(ours, "GISTEmbedLoss", vectors(5), guides, {}, torch.float32)


# ---- what somebody has replaced ----

MATRICES = {"GISTEmbedLoss": "forward", "CachedGISTEmbedLoss": "calculate_loss"}


def guided(package, name, change, columns, guides):
    loss = getattr(package, name)(Given(), Guided(), temperature=0.3)
    change(loss)
    batch = [
        {"embeddings": column, "guide": guide, "input_ids": torch.zeros(len(column), 2)}
        for column, guide in zip(columns, guides, strict=True)
    ]
    return loss(batch, None)


def summed(loss):
    loss.cross_entropy_loss = torch.nn.CrossEntropyLoss(reduction="sum")


def halved(loss):
    matrix = loss.sim_matrix
    loss.sim_matrix = lambda x, y: matrix(x, y) / 2


class Products(torch.nn.Module):
    def forward(self, x, y):
        return (x * y).sum(-1)


def of_products(loss):
    loss.similarity_fct = Products()


@pytest.mark.parametrize("change", [summed, halved, of_products])
@pytest.mark.parametrize("name", MATRICES)
def test_guided_losses_run_what_was_replaced(name, change):
    columns, guides = vectors(3), vectors(3, width=7)
    plain = guided(ours, name, lambda loss: None, columns, guides)
    with pytest.warns(UserWarning, match=f"{name}: .* has been replaced; sentence-transformers'"):
        value = guided(ours, name, change, columns, guides)
    assert torch.equal(value, guided(theirs, name, change, columns, guides))
    assert abs(value - plain) > 1e-3
    guided(ours, name, change, columns, guides)  # a second note would be an error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_subclass_with_another_card(dtype, monkeypatch):
    """What it says of itself is nothing that the loss is made of."""

    class Silent(ours.GISTEmbedLoss):
        def get_config_dict(self):
            return {"by": "us"}

    monkeypatch.setattr(ours, "Silent", Silent, raising=False)
    columns, guides = vectors(3), vectors(3, width=7)
    runs = [gist(ours, name, columns, guides, {}, dtype) for name in ("Silent", "GISTEmbedLoss")]
    for mine, plain in zip(*runs, strict=True):
        assert torch.equal(mine, plain)


def test_a_subclass_of_a_guided_loss(monkeypatch):
    columns, guides = vectors(2), vectors(2, width=7)
    values = []
    for package in (ours, theirs):

        class Halved(package.GISTEmbedLoss):
            def sim_matrix(self, *sides):
                return super().sim_matrix(*sides) / 2

        monkeypatch.setattr(package, "Halved", Halved, raising=False)
        expected = pytest.warns(UserWarning, match="Halved: sim_matrix has been replaced")
        with expected if package is ours else contextlib.nullcontext():
            values.append(guided(package, "Halved", lambda loss: None, columns, guides))
    assert torch.equal(*values)
