"""What the ranks exchange, recorded: the same calls in the same order, none of them waited for.

NCCL is not tried here. What can be said without it: every call is one that it has, of a type that
it carries, on contiguous tensors; all ranks make the same calls; on tensors of the `meta` device,
which hold no values, nothing between them asks for a value; and on the ring columns travel while
scores are worked on.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastsim
from fastsim import agreement, grad_cache, losses
from fastsim.backends.torch.backend import TorchBackend
from fastsim.distributed import Ring, join
from fastsim.gradient_sync import process_group_of, wrappers_of
from tests.distributed import ranks
from tests.distributed.recorder import CARRIED, GLOO_AND_NCCL, Done, recording
from tests.distributed.test_one_rank import ring_of_one
from tests.seeds import fresh
from tests.test_no_waiting import on_meta

RANKS, ROWS = 3, 5


@pytest.fixture
def more():
    """Rows that the other ranks have more than this one."""
    return 0


@pytest.fixture
def group(more, monkeypatch):
    """A group of three whose others are not there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())

    def exchange(group, numbers):
        failed, digest, rows, columns, *rest = numbers
        others = [failed, digest, rows + more, columns + more, *rest]
        return [numbers, *[others] * (RANKS - 1)]

    monkeypatch.setattr(agreement, "exchange", exchange)
    yield dist.group.WORLD
    dist.destroy_process_group()


def prepared(case, more, device):
    """(embeddings, other arguments, options) of this rank; more: rows of every other one."""
    generator = fresh(3)
    tensors, others, options = case.make(ROWS, ROWS, ranks.WIDTH, generator)
    if len(others) == 1 and isinstance(others[0], torch.Tensor) and others[0].dim() == 2:
        columns = ROWS * RANKS + (RANKS - 1) * more
        others[0] = torch.ones(ROWS, columns)
    if case.loss is fastsim.cosent_matrix:
        options["levels"] = torch.tensor([-1.0, 1.0], dtype=torch.float64, device=device)
    if "largest_group" in case.loss.__kwdefaults__:
        options["largest_group"] = ROWS * RANKS + (RANKS - 1) * more  # which would be waited for
    learnt = {
        name: torch.tensor(value, device=device, requires_grad=True)
        for name, value in ranks.LEARNT.items()
        if case.loss.__kwdefaults__.get(name) is not None
    }
    options = {k: on_meta(v) if device == "meta" else v for k, v in options.items()} | learnt
    others = [on_meta(v) if device == "meta" else v for v in others]
    return [t if t is None else t.to(device).requires_grad_() for t in tensors], others, options


@pytest.mark.parametrize("more", [0, 1], ids=["equal ranks", "unequal ranks"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("case", ranks.BATCHWISE, ids=repr)
def test_nothing_waits_between_the_collectives(case, exchange, group, more):
    if exchange not in [way[0] for way in ranks.ways(case, RANKS)]:
        pytest.skip(f"no {exchange}")
    sides, others, options = prepared(case, more, "meta")
    options["group"] = Ring(group) if exchange == "ring" else group
    calls = []
    with recording(calls, instead=lambda *_, **__: [Done()]):
        case.loss(*sides, *others, **options, backend="torch").sum().backward()
    assert all(side is None or side.grad.shape == side.shape for side in sides)
    assert calls
    for call in calls:
        assert call.name in GLOO_AND_NCCL, call
        assert call.dtype in CARRIED, call
        assert call.contiguous, call


def test_a_wait_between_them_would_show(group):
    calls = []
    value = torch.empty((), device="meta")
    with recording(calls, instead=lambda *_, **__: [Done()]):
        dist.all_reduce(value)
    assert [call.name for call in calls] == ["all_reduce"]
    with pytest.raises((RuntimeError, NotImplementedError)):
        value.item()


def test_labels_of_16_bits_travel_as_what_nccl_carries(group):
    calls = []
    with recording(calls, instead=lambda *_, **__: [Done()]):
        scores, labels = torch.zeros(4), torch.ones(4, dtype=torch.int16)
        fastsim.cosent(scores, labels, group=group)
    assert {call.dtype for call in calls} <= CARRIED


@pytest.mark.parametrize("more", [0, 1], ids=["equal ranks", "unequal ranks"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_strided_tensors_travel_as_they_are_read(exchange, group, more):
    """Every second column of what an encoder returns, and gradients that are one number."""
    sides = [torch.randn(ROWS, 2 * ranks.WIDTH, requires_grad=True) for _ in range(2)]
    chosen = Ring(group) if exchange == "ring" else group
    calls = []
    with recording(calls, instead=lambda *_, **__: [Done()]):
        x, y = (side[:, ::2] for side in sides)
        fastsim.info_nce(x, y, symmetric=True, group=chosen, backend="torch").backward()
        batch = join(chosen, "none", x, y, backend="torch")
        batch.gather_rows(x).sum().backward()
        # Summed as it lies in memory, which may be in other orders on other ranks.
        batch.total(sides[0].detach().t())
    assert exchange != "ring" or "batch_isend_irecv" in {call.name for call in calls}
    assert all(call.contiguous for call in calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_added_in_float32(dtype, group):
    calls = []
    x = torch.randn(ROWS, ranks.WIDTH, dtype=dtype, requires_grad=True)
    with recording(calls, instead=lambda *_, **__: [Done()]):
        join(group, "none", x, x, backend="torch").gather_rows(x).sum().backward()
    scattered = {call.dtype for call in calls if call.name.startswith("reduce_scatter")}
    assert scattered == {torch.float32}
    assert x.grad.dtype == dtype
    with recording(calls := [], instead=lambda *_, **__: [Done()]):
        fastsim.siglip(
            x, x.detach().requires_grad_(), group=Ring(group), backend="torch"
        ).backward()
    travelled = {call.dtype for call in calls if call.shape == x.shape}
    assert travelled == {dtype, torch.float32}  # the columns, and beside them their gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_a_mean_over_the_rows_that_count(dtype, group):
    """Not rounded to 16 bits; finite where no row of any rank counts."""
    x = torch.zeros(ROWS, ranks.WIDTH, dtype=dtype)
    with recording([], instead=lambda *_, **__: [Done()]):
        batch = join(group, "none", x, x, backend="torch")
        some, none = (batch.row_weights("mean", x, torch.tensor(count)) for count in (7, 0))
    wanted = torch.tensor(RANKS / 7, dtype=torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(some, wanted)
    assert none == RANKS


@pytest.mark.parametrize("number", [0, 1])
def test_all_ranks_make_the_same_calls(number, results):
    for count in ranks.RANKS:
        keys = [key for key in results[0]["calls"] if key[1] == count]
        assert keys
        for key in keys[number::2]:
            calls = [rank["calls"][key] for rank in results[:count]]
            if key[-1]:  # a rank without columns has none to send on the ring
                calls = [[c for c in made if c[0] != "batch_isend_irecv"] for made in calls]
            first, *others = calls
            assert all(other == first for other in others), key
            assert {call[0] for call in first} <= GLOO_AND_NCCL
            assert {call[1] for call in first} <= CARRIED


def test_shards_that_are_replicated_take_a_step_of_all_ranks(group):
    """Of a mesh of one dimension its own ranks."""
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "shards"))
    for placed, wanted in ((mesh, group), (mesh["shards"], mesh["shards"].get_group())):
        wrapped = fully_shard(torch.nn.Linear(6, 6), mesh=placed)
        assert process_group_of(wrappers_of(wrapped)) is wanted


# ---- groups that cannot serve ----


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_batch_without_rows_on_any_rank_is_refused(side, group, monkeypatch):
    place = 2 if side == "rows" else 3

    def exchange(group, numbers):
        nobody = [*numbers[:place], 0, *numbers[place + 1 :]]
        return [nobody] * RANKS

    monkeypatch.setattr(agreement, "exchange", exchange)
    x = torch.randn(ROWS, ranks.WIDTH)
    with pytest.raises(ValueError, match=f"^{side}: wanted at least one over all ranks"):
        join(group, "none", x, x, backend="torch")


def test_what_is_no_group_of_one_dimension_is_refused(group):
    x = torch.randn(ROWS, ranks.WIDTH)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "rows"))
    reason = "group: wanted a mesh of one dimension, got 2; .* one of 'replicas', 'rows'"
    with pytest.raises(ValueError, match=reason):
        fastsim.info_nce(x, x, group=mesh)
    with pytest.raises(
        TypeError, match=r"group: wanted a torch\.distributed process group .* got 3"
    ):
        fastsim.info_nce(x, x, group=3)
    with pytest.raises(ValueError, match=r"group: wanted a process group, .* got a Ring"):
        join(Ring(group), "none", x, x, backend="eager")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_around_a_ring_is_copied_with_its_ring(copied, group):
    """Its columns would be gathered otherwise, which is what they are too many for."""
    x = torch.randn(ROWS, ranks.WIDTH)
    module, calls = copied(losses.SigLIP(group=Ring(group), backend="torch")), []
    with recording(calls, instead=lambda *_, **__: [Done()]):
        module(x, x)
    assert "batch_isend_irecv" in {call.name for call in calls}


# ---- the ring ----


class Request:
    """Something on its way; `wait` is told."""

    def __init__(self, happened, number):
        self.happened, self.number = happened, number

    def wait(self):
        self.happened.append(("wait", self.number))


def happened_on_the_ring(group, call, monkeypatch):
    """[("send", number), ("wait", number), ("scores", "")] in their order."""
    happened = []

    def batch_isend_irecv(operations):
        number = sum(what == "send" for what, _ in happened)
        happened.append(("send", number))
        for each in operations:
            if each.op is dist.irecv:
                each.tensor.fill_(0.5)
        return [Request(happened, number)]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
    for name in ("forward", "score_grad"):
        plain = getattr(TorchBackend, name)

        def work(self, *arguments, plain=plain, **options):
            happened.append(("scores", ""))
            return plain(self, *arguments, **options)

        monkeypatch.setattr(TorchBackend, name, work)
    with recording([], instead=lambda *_, **__: [Done()]):
        monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        call(Ring(group))
    return happened


def test_columns_travel_while_scores_are_worked_on(group, monkeypatch):
    """A rank works on some scores between each sending and the wait for what it brings."""
    x, y = (torch.randn(ROWS, ranks.WIDTH, requires_grad=True) for _ in range(2))

    def call(ring):
        fastsim.info_nce(x, y, symmetric=True, group=ring, backend="torch").backward()

    happened = happened_on_the_ring(group, call, monkeypatch)
    sent = [number for what, number in happened if what == "send"]
    # Of each of two rounds: the columns twice, and three times what of them comes home.
    assert len(sent) == 2 * (RANKS - 1 + RANKS)
    waited_at_once = [
        number
        for number in sent
        if ("scores", "")
        not in happened[happened.index(("send", number)) : happened.index(("wait", number))]
    ]
    # But for what comes home at the end of a round: there is nothing left to do.
    assert len(waited_at_once) == 2


def test_ranks_of_a_ring_have_one_loss_scale(group, monkeypatch):
    """The least of theirs: gradients of columns are added on their way."""
    calls, asked = [], []

    def loss_scale(self, tile, weights, dtype, columns, coefficients=None):
        assert coefficients is not None
        asked.append(columns)
        return torch.tensor(2.0**6)

    monkeypatch.setattr(TorchBackend, "loss_scale", loss_scale)
    with recording(calls, instead=lambda *_, **__: [Done()]):
        ring_of_one("siglip", group)
    assert asked == [RANKS * ROWS]  # a row has gradients from the columns of all of them
    assert ("all_reduce", (), str(dist.ReduceOp.MIN)) in [(c.name, c.shape, c.how) for c in calls]


def test_a_step_of_grad_cache_reduces_by_calls_that_both_have(group):
    """Its own calls are those that agree on failures and on the number of micro-batches."""
    calls = []
    with recording(calls, instead=lambda *_, **__: None):
        counts = grad_cache._most([[1, 2], [1]], group, torch.device("cpu"))
    assert counts == [2, 1]
    assert {call.name for call in calls} <= GLOO_AND_NCCL
    assert isinstance(losses.SigLIP(group=group), torch.nn.Module)
