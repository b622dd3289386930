"""Losses of further packages against ours in their place; truth is their code in float64.

A package that is not installed is left out. Of packages that import torchvision and more, the
module of the losses is imported alone.
"""

import functools
import importlib
import importlib.util
import sys
import types

import pytest
import torch

import fastsim
from fastsim.integrations import overrides
from tests.integrations.peer_names import assert_serves
from tests.measure import assert_close
from tests.seeds import fresh

ROWS, WIDTH = 21, 12


def alone(monkeypatch, name, *empty):
    """The module `name`, its packages bare: no file of theirs runs but the ones that it imports.

    empty: modules that it imports and does not need.
    """
    root = name.partition(".")[0]
    if root not in sys.modules:
        found = importlib.util.find_spec(root)
        if found is None:
            pytest.skip(f"{root} is not installed")
        _bare(monkeypatch, root, found.submodule_search_locations[0])
    path = sys.modules[root].__path__[0]
    parts = name.split(".")
    for depth in range(1, len(parts)):
        _bare(monkeypatch, ".".join(parts[:depth]), "/".join([path, *parts[1:depth]]))
    for other in empty:
        monkeypatch.setitem(sys.modules, other, types.ModuleType(other))
    return importlib.import_module(name)


def _bare(monkeypatch, name, path):
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = [path]
        monkeypatch.setitem(sys.modules, name, module)


def of(*shape, seed):
    return 1.5 * torch.randn(*shape, generator=fresh(seed))


def compare(ours, theirs, tensors):
    """ours, theirs: functions of the tensors; value and gradients."""
    found = []
    for call, dtype in ((ours, torch.float32), (theirs, torch.float64), (theirs, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        value = call(*leaves)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for index, parts in enumerate(zip(*found, strict=True)):
        assert_close(f"part {index}", *parts, torch.float32)


# ---- lightly ----


@pytest.fixture
def lightly(monkeypatch):
    monkeypatch.setattr(overrides, "_said", set())
    name = "lightly.models.modules.memory_bank"
    alone(monkeypatch, name, "lightly.models.utils")
    folder = sys.modules["lightly"].__path__[0]
    _bare(monkeypatch, "lightly.utils", f"{folder}/utils")
    sys.modules["lightly.models"].utils = sys.modules["lightly.models.utils"]
    entropy = alone(monkeypatch, "lightly.loss.ntx_ent_loss")
    decoupled = alone(monkeypatch, "lightly.loss.dcl_loss")
    theirs = types.SimpleNamespace(**vars(entropy) | vars(decoupled))
    return importlib.import_module("fastsim.integrations.lightly"), theirs


LIGHTLY = [
    ("NTXentLoss", {}),
    ("NTXentLoss", {"temperature": 0.07}),
    ("DCLLoss", {}),
    ("DCLLoss", {"temperature": 0.5, "weight_fn": lambda x, y: 1 + (x * y).sum(1).detach()}),
]


@pytest.mark.parametrize(("name", "options"), LIGHTLY)
def test_lightly(lightly, name, options):
    ours, theirs = lightly
    assert issubclass(getattr(ours, name), getattr(theirs, name))
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(getattr(ours, name)(**options), getattr(theirs, name)(**options), views)
    one = [view[:1] for view in views]
    torch.testing.assert_close(getattr(ours, name)(**options)(*one), getattr(theirs, name)()(*one))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly_weights(lightly):
    ours, theirs = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(ours.DCLWLoss(sigma=0.3), theirs.DCLWLoss(sigma=0.3), views)


def test_lightly_without_a_fused_form(lightly):
    ours, _ = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    values = []
    for package in lightly:
        loss = package.NTXentLoss()
        loss.cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
        if package is ours:
            with pytest.warns(UserWarning, match="NTXentLoss: cross_entropy has no fused form"):
                values.append(loss(*views))
        else:
            values.append(loss(*views))
    assert torch.equal(*values)
    with pytest.warns(UserWarning, match="memory_bank_size has no fused form"):
        value = ours.NTXentLoss(memory_bank_size=(64, WIDTH))(*views)
    assert value.isfinite()


# ---- Tevatron ----


@pytest.fixture
def tevatron(monkeypatch):
    theirs = alone(monkeypatch, "tevatron.loss")
    sys.modules["tevatron"].loss = theirs
    return importlib.import_module("fastsim.integrations.tevatron"), theirs


def test_names_of_tevatron(tevatron):
    assert_serves(*tevatron)


@pytest.mark.parametrize("passages", [1, 3])
def test_tevatron(tevatron, passages):
    ours, theirs = (package.SimpleContrastiveLoss(passages) for package in tevatron)
    assert isinstance(ours, type(theirs))
    sides = of(ROWS, WIDTH, seed=1), of(ROWS * passages, WIDTH, seed=2)
    compare(ours, theirs, sides)
    target = torch.arange(ROWS).flip(0)
    for reduction in ("mean", "sum"):
        options = {"target": target, "reduction": reduction}
        compare(*(functools.partial(loss, **options) for loss in (ours, theirs)), sides)
    values = [loss(*sides, target=target, reduction="none") for loss in (ours, theirs)]
    torch.testing.assert_close(*values)
    half = [side.bfloat16() for side in sides]
    assert ours(*half).dtype == theirs(*half).dtype
    with pytest.raises(ValueError, match="y: wanted"):
        ours(sides[0], sides[1][1:])


# ---- FlagEmbedding ----


@pytest.fixture
def flag(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = alone(monkeypatch, "FlagEmbedding.abc.finetune.embedder.AbsModeling")
    ours = importlib.import_module("fastsim.integrations.flag_embedding")

    class Model(theirs.AbsEmbedderModel):
        """Their encoder-only model's loss of embeddings at hand."""

        def encode(self, features):
            return features

        def compute_score(self, queries, passages):
            return queries @ passages.T / self.temperature

        def compute_loss(self, scores, target):
            return torch.nn.functional.cross_entropy(scores, target)

        def save(self, output_dir):
            raise NotImplementedError

    return Model, ours


@pytest.mark.parametrize(("passages", "temperature"), [(1, 1.0), (4, 1.0), (4, 0.02)])
def test_flag_embedding(flag, passages, temperature):
    model, ours = flag

    class Changed(model):
        _compute_in_batch_neg_loss = ours.in_batch_loss

    sides = [torch.nn.functional.normalize(of(n, WIDTH, seed=n)) for n in (ROWS, ROWS * passages)]
    losses = [kind(None, temperature=temperature).train() for kind in (Changed, model)]
    compare(*(lambda q, p, loss=loss: loss(q, p).loss for loss in losses), sides)
    teacher = torch.rand(ROWS * passages).tolist()
    values = [loss(*sides, teacher_scores=teacher).loss for loss in losses]
    torch.testing.assert_close(*values)
    half = [side.bfloat16() for side in sides]
    assert len({loss(*half).loss.dtype for loss in losses}) == 1


# ---- Lightning ----


@pytest.mark.filterwarnings("default")  # those of its own libraries
def test_lightning(tmp_path):
    """A loss with a learnt temperature is a module of the LightningModule."""
    lightning = pytest.importorskip("pytorch_lightning", reason="it is not installed")

    class Towers(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.towers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 8) for _ in "xy")
            self.scale = torch.nn.Parameter(torch.tensor(10.0))
            self.seen = []

        def training_step(self, batch, index):
            x, y = (tower(side) for tower, side in zip(self.towers, batch, strict=True))
            loss = fastsim.info_nce(x, y, temperature=1 / self.scale)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.05)

    batches = [(of(16, WIDTH, seed=1), of(16, WIDTH, seed=2))] * 20
    model = Towers()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    assert model.seen[-1] < 0.5 * model.seen[0]
    assert model.scale != 10.0
