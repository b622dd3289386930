"""A small loss looks at its arguments once for each signature, and at all that may differ anew."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fastsim
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.torch.backend import TorchBackend
from fastsim.engine import prepared
from fastsim.verify import verdicts
from tests.seeds import fresh

N, M, D = 6, 9, 5


def sides(seed, *, dtype=torch.float32, wants=True):
    generator = fresh(seed)
    rows = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M))
    return [r.to(dtype).requires_grad_(wants) for r in rows]


def groups(seed):
    return torch.randint(0, 3, (N,), generator=fresh(seed))


def _triplets(seed):
    x, y = sides(seed)
    return [x, y[:N].detach().requires_grad_(), (y[:N] * x).detach().requires_grad_()]


def _labelled(seed):
    x, y = sides(seed)
    return [x, y[:N].detach().requires_grad_(), torch.randn(N, generator=fresh(seed + 70))]


def _halved(seed):
    """`_labelled`, of an even width."""
    *both, labels = _labelled(seed)
    return [*(side.detach()[:, : D - 1].requires_grad_() for side in both), labels]


def _taught(seed):
    x, y = sides(seed)
    return [x, y, *(side.detach() * 2 + 1 for side in sides(seed + 50))]


def normal(*shape):
    return torch.randn(shape, generator=fresh(71))


def _targeted(seed):
    return [*sides(seed), torch.randn(N, M, generator=fresh(seed + 60))]


def learning(loss, *names):
    """The loss with its last arguments under these names."""

    def given(function):
        def call(*tensors, **options):
            count = len(tensors) - len(names)
            learnt = dict(zip(names, tensors[count:], strict=True))
            return function(*tensors[:count], **learnt, **options)

        return call

    call = given(loss)
    call.__wrapped__ = given(loss.__wrapped__)
    return call


def _learnt(seed, *, count=1, dtype=torch.float32, sides=sides):
    """Sides, and targets if `sides` makes any; then positive tensors of one."""
    values = 0.1 + torch.rand(count, generator=fresh(seed + 80), dtype=torch.float64)
    return [*sides(seed), *(value.to(dtype).requires_grad_() for value in values)]


def _placed(seed):
    """Sides, and positives."""
    return [*sides(seed), torch.randint(0, M, (N,), generator=fresh(seed + 90))]


def _with_ids(seed):
    """Sides, and ids of rows and of columns."""
    ids = (torch.randint(0, 4, (n,), generator=fresh(seed + 95)) for n in (N, M))
    return [*sides(seed), *ids]


def excluding(x, y, row_ids, column_ids, **options):
    return fastsim.info_nce(x, y, exclude=(row_ids, column_ids), **options)


def _excluding_anew(x, y, row_ids, column_ids, **options):
    return fastsim.info_nce.__wrapped__(x, y, exclude=(row_ids, column_ids), **options)


excluding.__wrapped__ = _excluding_anew
GROUPS = (torch.arange(N) % 3, torch.arange(M) % 3)
EVERY_WAY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CALLS = {
    "smoothed": (fastsim.info_nce, sides, {"label_smoothing": 0.1}),
    "directions": (fastsim.info_nce, sides, {"directions": EVERY_WAY, "margin": 0.1}),
    "references": (fastsim.info_nce, sides, {"references": normal(4, D)}),
    "own": (fastsim.info_nce, sides, {"own_negatives": normal(N, 2, D)}),
    "guided": (fastsim.info_nce, sides, {"guide": (normal(N, 3), normal(M, 3))}),
    "biased": (fastsim.info_nce, sides, {"candidate_bias": normal(M), "symmetric": True}),
    "biased and guided": (
        fastsim.info_nce,
        sides,
        {"guide": (normal(N, 3), normal(M, 3)), "candidate_bias": normal(M)},
    ),
    "weighed": (
        fastsim.siglip,
        sides,
        {"targets": GROUPS, "positive_weight": "both"},
    ),
    "matrix_mse": (fastsim.matrix_mse, _targeted, {}),
    "matrix_mse groups": (fastsim.matrix_mse, sides, {"targets": GROUPS}),
    "matrix_cross_entropy": (fastsim.matrix_cross_entropy, _targeted, {"temperature": 0.2}),
    "matrix_cross_entropy groups": (fastsim.matrix_cross_entropy, sides, {"targets": GROUPS}),
    "distill": (fastsim.distill, _taught, {}),
    "margins": (fastsim.distill, _taught, {"kind": "margin_mse"}),
    "info_nce": (fastsim.info_nce, sides, {}),
    "symmetric": (fastsim.info_nce, sides, {"symmetric": True, "margin": 0.1}),
    "sum": (fastsim.info_nce, sides, {"reduction": "sum"}),
    "siglip": (fastsim.siglip, sides, {}),
    "decoupled": (fastsim.decoupled_contrastive, sides, {}),
    "debiased": (fastsim.debiased_contrastive, sides, {}),
    "full_triplet": (fastsim.full_triplet, sides, {"mining": "hard"}),
    "batch_hard": (
        fastsim.batch_hard_triplet,
        lambda seed: [sides(seed)[0], groups(seed)],
        {"margin": 0.5},
    ),
    "triplet_margin": (fastsim.triplet_margin, _triplets, {"margin": 0.3}),
    "cosine_regression": (fastsim.cosine_regression, _labelled, {}),
    "angle": (fastsim.angle, _halved, {}),
}
PLACED = {
    "alone": {},
    "symmetric": {"symmetric": True},
    "smoothed": {"label_smoothing": 0.1},
    "guided": {"guide": (normal(N, 3), normal(M, 3))},
    "biased": {"candidate_bias": normal(M)},
    "own": {"own_negatives": normal(N, 2, D), "exclude_above": 0.1},
}
for _name, _options in PLACED.items():
    CALLS[f"positives {_name}"] = (fastsim.info_nce, _placed, _options)
    if _name != "smoothed":  # which refuses ids
        CALLS[f"ids {_name}"] = (excluding, _with_ids, _options)
_IN_FLOAT64 = partial(_learnt, dtype=torch.float64)
LEARNT = {
    "info_nce": (learning(fastsim.info_nce, "temperature"), _learnt, {}),
    "info_nce in float64": (learning(fastsim.info_nce, "temperature"), _IN_FLOAT64, {}),
    "symmetric": (learning(fastsim.info_nce, "temperature"), _learnt, {"symmetric": True}),
    "guided": (
        learning(fastsim.info_nce, "temperature"),
        _learnt,
        {"guide": (normal(N, 3), normal(M, 3))},
    ),
    "smoothed": (learning(fastsim.info_nce, "temperature"), _learnt, {"label_smoothing": 0.1}),
    "decoupled": (learning(fastsim.decoupled_contrastive, "temperature"), _learnt, {}),
    "debiased": (learning(fastsim.debiased_contrastive, "temperature"), _learnt, {}),
    "matrix_cross_entropy": (
        learning(fastsim.matrix_cross_entropy, "targets", "temperature"),
        partial(_learnt, sides=_targeted),
        {},
    ),
    "matrix_cross_entropy groups": (
        learning(fastsim.matrix_cross_entropy, "temperature"),
        _learnt,
        {"targets": GROUPS},
    ),
    "siglip": (learning(fastsim.siglip, "scale", "bias"), partial(_learnt, count=2), {}),
    "siglip in float64": (
        learning(fastsim.siglip, "bias", "scale"),
        partial(_IN_FLOAT64, count=2),
        {},
    ),
    "siglip scale": (learning(fastsim.siglip, "scale"), _learnt, {}),
    "siglip bias": (learning(fastsim.siglip, "bias"), _learnt, {}),
    "siglip groups": (
        learning(fastsim.siglip, "scale", "bias"),
        partial(_learnt, count=2),
        {"targets": GROUPS},
    ),
}
CALLS |= {f"learnt {name}": call for name, call in LEARNT.items()}


def results(loss, tensors, options):
    for tensor in tensors:
        tensor.grad = None
    value = loss(*tensors, **options)
    value.backward()
    grads = [tensor.grad for tensor in tensors if tensor.requires_grad]
    with torch.no_grad():
        return [value.detach(), loss(*tensors, **options), *grads]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_the_bits_of_the_first(name, usable):
    """Whatever the tensors hold; the undecorated loss has looked at everything."""
    usable("cpu")
    loss, make, options = CALLS[name]
    for seed in range(3):
        tensors = make(seed)
        again, anew = (results(f, tensors, options) for f in (loss, loss.__wrapped__))
        assert all(map(torch.equal, again, anew))


@pytest.mark.parametrize("name", CALLS)
def test_the_next_call_looks_at_nothing_again(name, usable, monkeypatch):
    usable("cpu")
    loss, make, options = CALLS[name]
    wanted = loss(*make(1), **options)
    monkeypatch.setattr(CpuBackend, "unsupported_reason", lambda *_, **__: pytest.fail("looked"))
    assert torch.equal(loss(*make(1), **options), wanted)
    with pytest.raises(pytest.fail.Exception, match="looked"):
        loss(*make(1), **(options | ({"scale": 3.0} if name == "angle" else {"reduction": "none"})))


def test_what_differs_is_looked_at_anew(usable):
    usable("cpu")
    x, y = sides(3)
    fastsim.info_nce(x, y)
    with pytest.raises(TypeError, match="candidates"):
        fastsim.info_nce(x, y.double())
    with pytest.raises(ValueError, match="candidates"):
        fastsim.info_nce(x, y[:, :4])
    with pytest.raises(ValueError, match="temperature"):
        fastsim.info_nce(x, y, temperature=-1.0)
    fastsim.info_nce(x, y, margin=1)
    with pytest.raises(TypeError, match="margin"):
        fastsim.info_nce(x, y, margin=True)
    with pytest.raises(TypeError, match="candidates"):
        fastsim.info_nce(x, y.to_sparse())
    with fastsim.use_backend("triton"), pytest.raises(RuntimeError, match="triton"):
        fastsim.info_nce(x, y)


@pytest.mark.parametrize("changed", ["verdicts", "precision"])
def test_the_backend_is_chosen_anew(changed, usable, monkeypatch, precision):
    """Where a verdict has changed, or the products of float32 that verdicts are of."""
    usable("cpu")
    tensors = sides(3)
    fastsim.info_nce(*tensors)
    looked = []
    monkeypatch.setattr(CpuBackend, "unsupported_reason", lambda *_, **__: looked.append(1))
    if changed == "verdicts":
        verdicts.forget()
    else:
        precision("medium")
    fastsim.info_nce(*tensors)
    assert len(looked) == 1
    fastsim.info_nce(*tensors)
    assert len(looked) == 1


def test_a_recorded_call_takes_and_leaves_nothing(monkeypatch):
    """While a CUDA graph is recorded: its replays outlive what is kept here."""
    looked, recording = [], [True]
    monkeypatch.setattr(TorchBackend, "unsupported_reason", lambda *_, **__: looked.append(1))
    monkeypatch.setattr(prepared, "_capturing", lambda tensors: recording[0])
    tensors = sides(3)
    options = {"temperature": 0.321, "backend": "torch"}  # of no other test

    def call():
        looked.clear()
        fastsim.info_nce(*tensors, **options)
        return len(looked)

    assert call()
    assert call()
    recording[0] = False
    assert call()  # nothing was left
    assert not call()
    recording[0] = True
    assert call()  # nothing is taken


@pytest.mark.parametrize("on_gpu", [True, False])
def test_who_is_asked_whether_a_graph_is_recorded(on_gpu, monkeypatch):
    """CUDA, of tensors on a GPU alone: without one there is nobody to ask."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(1) or True)
    tensors = [SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=on_gpu)]
    assert prepared._capturing(tensors) == on_gpu
    assert len(asked) == on_gpu


def test_a_tensor_of_another_meaning_is_no_side(usable):
    """A learnt temperature, ids and a side given twice: each has a loss of its own."""
    usable("cpu")
    x, y = sides(4)
    assert fastsim.siglip(x, x) != fastsim.siglip(x, y[:N])
    for temperature in (0.1, 0.2):
        learnt = torch.tensor(temperature, requires_grad=True)
        got = fastsim.info_nce(x, y, temperature=learnt)
        assert torch.equal(got, fastsim.info_nce(x, y, temperature=learnt.item()))
    for seed in (1, 2):
        own = groups(seed), torch.arange(M) % 3
        got = fastsim.siglip(x, y, own)
        torch.testing.assert_close(got, fastsim.siglip(x, y, own, backend="eager"))


@pytest.fixture
def looked():
    """(a loss that leaves a shortcut, the tensors of the calls that looked at its arguments)."""
    seen = []

    @prepared.once_per_signature
    def loss(x):
        seen.append(x)
        value = x.sum()
        prepared.note((x,), torch.sum, value)
        return value

    return loss, seen


def test_more_signatures_than_are_kept_are_forgotten_together(looked, monkeypatch):
    loss, seen = looked
    monkeypatch.setattr(prepared, "MOST", 2)
    for rows in (1, 2, 1, 3, 3, 1):
        loss(torch.ones(rows))
    assert [len(x) for x in seen] == [1, 2, 3, 1]


def test_what_goes_on_with_a_noted_loss_has_no_shortcut():
    """The shortcut would return that loss, and not what became of it."""

    def noted(x):
        loss = x.sum()
        prepared.note((x,), torch.sum, loss)
        return loss

    doubled = prepared.once_per_signature(lambda x: 2 * noted(x))
    assert [doubled(torch.ones(3)).item() for _ in range(2)] == [6.0, 6.0]
    alone = prepared.once_per_signature(noted)
    assert [alone(torch.ones(3)).item() for _ in range(2)] == [3.0, 3.0]


def test_each_device_is_looked_at(looked):
    loss, seen = looked
    for device in ("cpu", "meta", "cpu", "meta"):
        loss(torch.ones(1, device=device))
    assert [x.device.type for x in seen] == ["cpu", "meta"]


def test_nothing_of_a_batch_is_held(usable):
    usable("cpu")
    held = {}
    for name, (loss, make, options) in CALLS.items():
        tensors = make(5)
        loss(*tensors, **options).backward()
        held[name] = [weakref.ref(tensor) for tensor in tensors]
        del tensors
    gc.collect()
    assert not [name for name, refs in held.items() if any(ref() is not None for ref in refs)]


def test_what_watches_or_transforms_goes_the_whole_way(usable):
    usable("cpu")
    x, y = sides(6)
    wanted = fastsim.info_nce(x, y)
    with fastsim.metrics() as seen:
        assert torch.equal(fastsim.info_nce(x, y), wanted)
    assert seen.read()["accuracy"] >= 0
    (grad,) = torch.autograd.grad(wanted, x)
    torch.testing.assert_close(torch.func.grad(fastsim.info_nce)(x, y), grad)
    (again,) = torch.autograd.grad(fastsim.info_nce(x, y), x, create_graph=True)
    again.square().sum().backward()
    assert y.grad.isfinite().all()


@pytest.mark.parametrize("name", LEARNT)
def test_learnt_numbers_are_looked_at_each_time(name, usable):
    usable("cpu")
    loss, make, options = LEARNT[name]
    count = sum(tensor.numel() == 1 for tensor in make(8))
    loss(*make(8), **options)
    for place in range(1, count + 1):
        tensors = make(8)
        tensors[-place] = tensors[-place].detach() * torch.nan
        with pytest.raises(ValueError, match=r"^\w+: wanted a .*number, got nan"):
            loss(*tensors, **options)
        tensors[-place].requires_grad_()
        with pytest.raises(ValueError, match=r"^\w+: wanted a .*number, got nan"):
            loss(*tensors, **options)


@pytest.mark.parametrize("loss", [fastsim.cosine_regression, fastsim.angle])
def test_labels_are_looked_at_each_time(loss, usable):
    usable("cpu")
    *both, labels = _halved(8)
    loss(*both, labels)
    with pytest.raises(ValueError, match="labels: wanted labels that can be ordered, got NaN"):
        loss(*both, labels.index_fill(0, torch.tensor([2]), torch.nan))
    ends = labels.index_copy(0, torch.arange(2), torch.tensor([torch.inf, -torch.inf]))
    loss(*both, ends)  # whose sum is NaN, and none of them


def test_a_bias_is_looked_at_each_time(usable):
    usable("cpu")
    x, y = sides(9)
    bias = normal(M)
    before = fastsim.info_nce(x, y, candidate_bias=bias)
    assert fastsim.info_nce(x, y, candidate_bias=2 * bias) != before
    fastsim.info_nce(x, y, candidate_bias=bias.sign() * torch.finfo(bias.dtype).max)  # sum: inf
    with pytest.raises(ValueError, match="candidate_bias: wanted finite numbers, got -inf"):
        fastsim.info_nce(x, y, candidate_bias=bias.index_fill(0, torch.tensor([3]), -torch.inf))
    with pytest.raises(ValueError, match="candidate_bias: wanted a tensor without a gradient"):
        fastsim.info_nce(x, y, candidate_bias=bias.clone().requires_grad_())
    with pytest.raises(ValueError, match="candidate_bias: wanted 9 numbers, one per column, got 8"):
        fastsim.info_nce(x, y, candidate_bias=bias[:8])


@pytest.mark.parametrize("options", PLACED.values(), ids=PLACED)
def test_positives_are_looked_at_each_time(options, usable):
    usable("cpu")
    x, y, positives = _placed(9)
    fastsim.info_nce(x, y, positives, **options)
    for outside in (-1, M):
        with pytest.raises(ValueError, match=f"positives: wanted .*{outside}"):
            fastsim.info_nce(x, y, positives.index_fill(0, torch.tensor([3]), outside), **options)


@pytest.mark.parametrize("variable", ["FASTSIM_PANEL_MB", "FASTSIM_COMPILE", "FASTSIM_BACKEND"])
def test_a_variable_is_part_of_the_signature(variable, looked, monkeypatch):
    loss, seen = looked
    x = torch.ones(2)
    for value in ("", "1", "1", ""):
        monkeypatch.setenv(variable, value)
        loss(x)
    assert len(seen) == 2


def test_all_shortcuts_can_be_forgotten(looked):
    loss, seen = looked
    for _ in range(2):
        loss(torch.ones(2))
        loss(torch.ones(2))
        prepared.forget()
    assert len(seen) == 2
