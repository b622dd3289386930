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


def mixed(sides):
    """The same in two dtypes, and twice in float32: (given, plain)."""
    given = sides[0].bfloat16(), sides[1]
    return given, [side.float() for side in given]


def doubling(monkeypatch, owner, name):
    """A patch of a method, whose result is doubled."""
    shipped = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **options: 2 * shipped(*given, **options))


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
    ("DCLLoss", {"weight_fn": lambda x, y: 0.7}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()[None]}),
    ("DCLLoss", {"weight_fn": lambda x, y: 2 + x[:, 0].detach()}),  # not the same turned round
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


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
def test_lightly_of_two_dtypes(lightly, name):
    given, plain = mixed([of(ROWS, WIDTH, seed=seed) for seed in (1, 2)])
    ours, theirs = (getattr(package, name)() for package in lightly)
    torch.testing.assert_close(ours(*given), ours(*plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).dtype == theirs(*given).dtype


@pytest.mark.parametrize(
    ("name", "owner"),
    [("NTXentLoss", "NTXentLoss"), ("DCLLoss", "DCLLoss"), ("DCLWLoss", "DCLLoss")],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_patch_of_lightly(lightly, name, owner, monkeypatch):
    ours, theirs = (getattr(package, name)() for package in lightly)
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    plain = ours(*views)
    doubling(monkeypatch, getattr(lightly[1], owner), "forward")
    with pytest.warns(UserWarning, match=f"{name}: forward has no fused form"):
        value = ours(*views)
    assert torch.equal(value, theirs(*views))
    torch.testing.assert_close(value, 2 * plain)


# ---- Tevatron ----

# What its repository has; the package has an __init__ with n_target.
REPOSITORY = """
import torch
from torch.nn import functional as F

class SimpleContrastiveLoss:
    def __call__(self, x, y, target=None, reduction='mean'):
        if target is None:
            target_per_qry = y.size(0) // x.size(0)
            target = torch.arange(0, x.size(0) * target_per_qry, target_per_qry)
        logits = torch.matmul(x, y.transpose(0, 1))
        return F.cross_entropy(logits, target, reduction=reduction)

class DistributedContrastiveLoss(SimpleContrastiveLoss): pass
"""


@pytest.fixture
def repository(tevatron, monkeypatch):
    theirs = types.ModuleType("tevatron.loss")
    exec(REPOSITORY, vars(theirs))
    monkeypatch.setitem(sys.modules, "tevatron.loss", theirs)
    monkeypatch.setattr(sys.modules["tevatron"], "loss", theirs)
    spec = importlib.util.spec_from_file_location("of_the_repository", tevatron[0].__file__)
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    return ours, theirs


@pytest.mark.parametrize("passages", [ROWS, 3 * ROWS, 3 * ROWS + 2])
def test_tevatron_of_the_repository(repository, passages):
    ours, theirs = (package.SimpleContrastiveLoss() for package in repository)
    sides = of(ROWS, WIDTH, seed=1), of(passages, WIDTH, seed=2)
    compare(ours, theirs, sides)
    target = torch.arange(ROWS).flip(0)
    compare(*(functools.partial(loss, target=target) for loss in (ours, theirs)), sides)
    half = [side.bfloat16() for side in sides]
    assert ours(*half).dtype == theirs(*half).dtype


def scored(kind):
    class Scored(kind):
        temperature = 0.5

        def __call__(self, x, y, **options):
            return super().__call__(x / self.temperature, y, **options)

    loss = Scored()
    loss.temperature = 0.1
    return loss


def test_tevatron_with_further_attributes(tevatron):
    ours, theirs = (scored(package.SimpleContrastiveLoss) for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    with pytest.warns(UserWarning, match="Scored: temperature has no fused form; tevatron's"):
        value = ours(*sides)
    assert torch.equal(value, theirs(*sides))
    ours(*sides)  # a second note would be an error


def test_a_patch_of_tevatron(tevatron, monkeypatch):
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    plain = ours(*sides)
    doubling(monkeypatch, tevatron[1].SimpleContrastiveLoss, "__call__")
    with pytest.warns(UserWarning, match="SimpleContrastiveLoss: __call__ has no fused form"):
        value = ours(*sides)
    assert torch.equal(value, theirs(*sides))
    torch.testing.assert_close(value, 2 * plain)


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "as on a GPU"])
def test_tevatron_leaves_out_what_is_ignored(tevatron, reduction, read, monkeypatch):
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    if not read:
        monkeypatch.setattr(tevatron[0], "can_be_read", lambda target: False)
    sides = of(ROWS, WIDTH, seed=1), of(2 * ROWS, WIDTH, seed=2)
    target = torch.randint(0, 2 * ROWS, (ROWS,), generator=fresh(3))
    target[[2, 5]] = -100

    def call(loss):
        return lambda x, y: loss(x, y, target=target, reduction=reduction).square().sum()

    compare(call(ours), call(theirs), sides)
    assert ours(*sides, target=torch.full((ROWS,), -100)).isnan()


def test_tevatron_of_other_targets(tevatron):
    """Bytes are places, floats are probabilities, which are theirs."""
    ours, theirs = (package.SimpleContrastiveLoss() for package in tevatron)
    sides = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2)
    places = torch.arange(ROWS).flip(0)
    wanted = theirs(*sides, target=places)
    for dtype in (torch.uint8, torch.int32):
        torch.testing.assert_close(ours(*sides, target=places.to(dtype)), wanted)
    soft = of(ROWS, ROWS, seed=3).softmax(1)
    overrides._said.clear()
    with pytest.warns(
        UserWarning, match=r"a target of torch\.float32 has no fused form; tevatron's"
    ):
        value = ours(*sides, target=soft)
    assert torch.equal(value, theirs(*sides, target=soft))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match=r"x of torch\.bfloat16 against y"):
            value = ours(sides[0].bfloat16(), sides[1])
        assert torch.equal(value, theirs(sides[0].bfloat16(), sides[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, target: (x, y[:, 1:], target), f"y: wanted width {WIDTH}"),
        (lambda x, y, target: (x, y[:0], target), "y: wanted at least one element"),
        (lambda x, y, target: (x[None], y, target), "x: wanted 2"),
        (lambda x, y, target: (x, y, target[1:]), f"target: wanted {ROWS} entries"),
        (lambda x, y, target: (x, y, target[:, None]), "target: wanted 1 dim"),
        (lambda x, y, target: (x, y, target + 1), f"target: wanted values in .0, {ROWS}."),
        (lambda x, y, target: (x, y, target - 1), f"target: wanted values in .0, {ROWS}."),
    ],
)
def test_tevatron_refuses_what_does_not_fit(tevatron, change, message):
    loss = tevatron[0].SimpleContrastiveLoss()
    given = of(ROWS, WIDTH, seed=1), of(ROWS, WIDTH, seed=2), torch.arange(ROWS)
    with pytest.raises(ValueError, match=message):
        loss(*change(*given))


# ---- FlagEmbedding ----

MODELS = "FlagEmbedding.finetune.embedder.encoder_only.base.modeling"


@pytest.fixture
def flag(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    abstract = alone(monkeypatch, "FlagEmbedding.abc.finetune.embedder.AbsModeling")
    package = sys.modules["FlagEmbedding.abc.finetune.embedder"]
    monkeypatch.setattr(package, "AbsEmbedderModel", abstract.AbsEmbedderModel, raising=False)
    theirs = alone(monkeypatch, MODELS)
    ours = importlib.import_module("fastsim.integrations.flag_embedding")

    class Model(theirs.BiEncoderOnlyEmbedderModel):
        """Their encoder-only model's loss of embeddings at hand."""

        def encode(self, features):
            return features

    return Model, ours


def patched(flag):
    """(a model with our loss, one with theirs)."""
    model, ours = flag

    class Changed(model):
        _compute_in_batch_neg_loss = ours.in_batch_loss
        _compute_cross_device_neg_loss = ours.cross_device_loss

    return Changed, model


def pairs(passages):
    return [torch.nn.functional.normalize(of(n, WIDTH, seed=n)) for n in (ROWS, ROWS * passages)]


@pytest.mark.parametrize(("passages", "temperature"), [(1, 1.0), (4, 1.0), (4, 0.02)])
def test_flag_embedding(flag, passages, temperature):
    sides = pairs(passages)
    losses = [kind(None, temperature=temperature).train() for kind in patched(flag)]
    compare(*(lambda q, p, loss=loss: loss(q, p).loss for loss in losses), sides)
    teacher = torch.rand(ROWS * passages).tolist()
    values = [loss(*sides, teacher_scores=teacher).loss for loss in losses]
    torch.testing.assert_close(*values)
    half = [side.bfloat16() for side in sides]
    assert len({loss(*half).loss.dtype for loss in losses}) == 1


def across(kind, **options):
    """A model that gathers from two devices, this one the second."""

    class Across(kind):
        process_rank = 1

        def _dist_gather_tensor(self, t):
            return torch.cat([-t.detach(), t])

    loss = Across(None, **options).train()
    loss.negatives_cross_device = True
    return loss


@pytest.mark.parametrize("passages", [1, 3])
def test_flag_embedding_across_devices(flag, passages, monkeypatch):
    sides = pairs(passages)
    losses = [across(kind, temperature=0.1) for kind in patched(flag)]
    compare(*(lambda q, p, loss=loss: loss(q, p).loss for loss in losses), sides)
    teacher = torch.rand(ROWS * passages).tolist()
    values = [loss(*sides, teacher_scores=teacher).loss for loss in losses]
    assert torch.equal(*values)
    for loss in losses:
        loss.cross_entropy = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.warns(UserWarning, match="cross_entropy has no fused form; FlagEmbedding's"):
        value = losses[0](*sides).loss
    assert torch.equal(value, losses[1](*sides).loss)
    monkeypatch.setattr(flag[1], "_theirs", None)  # which the loss of one device would call
    scores = functools.partial(torch.cdist)
    own = losses[0]._compute_cross_device_neg_loss(*sides, compute_score_func=scores)
    assert torch.equal(own[1], losses[1]._compute_cross_device_neg_loss(*sides, None, scores)[1])


def test_flag_embedding_across_devices_is_fused(flag, monkeypatch):
    losses = [across(kind) for kind in patched(flag)]
    monkeypatch.setattr(flag[1], "cross_entropy", lambda *given, **named: torch.tensor(7.0))
    assert losses[0](*pairs(2)).loss == 7


def test_flag_embedding_of_two_dtypes(flag):
    given, plain = mixed(pairs(2))
    ours, theirs = (kind(None, temperature=0.1).train() for kind in patched(flag))
    torch.testing.assert_close(ours(*given).loss, ours(*plain).loss)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).loss.dtype == theirs(*given).loss.dtype


def test_flag_embedding_of_another_width(flag):
    queries, passages = pairs(2)
    loss = patched(flag)[0](None).train()
    with pytest.raises(ValueError, match=f"p_reps: wanted width {WIDTH}"):
        loss(queries, passages[:, 1:])


def doubled(kind):
    class Doubled(kind):
        def compute_score(self, queries, passages):
            return 2 * super().compute_score(queries, passages)

    return Doubled(None)


def distances(kind):
    loss = kind(None)
    loss._compute_similarity = lambda queries, passages: -torch.cdist(queries, passages)
    return loss


def own_loss(kind):
    class Own(kind):
        def compute_loss(self, scores, target):
            return torch.nn.functional.multi_margin_loss(scores, target)

    return Own(None)


def smoothed(kind):
    loss = kind(None)
    loss.cross_entropy = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    return loss


def summed(kind):
    loss = kind(None)
    loss.cross_entropy.reduction = "sum"
    return loss


def negative(kind):
    return kind(None, temperature=-0.5)


REPLACED = {
    doubled: "compute_score",
    distances: "_compute_similarity",
    own_loss: "compute_loss",
    smoothed: "cross_entropy",
    summed: "cross_entropy",
    negative: "temperature",
}


@pytest.mark.parametrize("change", REPLACED)
def test_flag_embedding_where_something_was_replaced(flag, change):
    sides = pairs(2)
    ours, theirs = (change(kind).train() for kind in patched(flag))
    with pytest.warns(UserWarning, match=f"{REPLACED[change]} has no fused form; FlagEmbedding's"):
        value = ours(*sides).loss
    assert torch.equal(value, theirs(*sides).loss)
    assert torch.equal(ours(*sides).loss, value)  # a second note would be an error


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
