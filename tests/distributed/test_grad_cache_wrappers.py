"""What GradCache tells a wrapper of the encoder: DeepSpeed's engine, modules in shards."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastsim
from fastsim import grad_cache, losses
from fastsim.grad_cache import GradCache
from fastsim.gradient_sync import _group_of, wrappers_of
from tests.distributed.layers import WIDTH, encoder


class Failing(torch.nn.Module):
    """Fails at its so many-th call, None: at none."""

    def __init__(self, module, fails_at=None):
        super().__init__()
        self.module, self.calls, self.fails_at = module, 0, fails_at

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("no such token")
        return self.module(x)


class Engine(Failing):
    """Of DeepSpeed's engine what says where an accumulation ends, None: it counts the steps."""

    _is_gradient_accumulation_boundary = None

    def set_gradient_accumulation_boundary(self, is_boundary):
        self._is_gradient_accumulation_boundary = is_boundary

    def backward(self, loss, scale_wrt_gas=True):
        loss.backward()


@pytest.mark.parametrize("fails_at", [None, 3, 6])  # calls 1 to 4 are of the first pass
@pytest.mark.parametrize("before", [None, True, False])
def test_an_engine_counts_on_as_before(before, fails_at):
    """After an error too: what it was told within the step would hold for all later steps."""
    engine = Engine(encoder(), fails_at)
    engine._is_gradient_accumulation_boundary = before
    cache = GradCache(engine, losses.InfoNCE(), micro_batch_size=4)
    columns = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="token") if fails_at else contextlib.nullcontext():
        cache.backward(*columns)
    assert engine._is_gradient_accumulation_boundary is before


def step_of(engine, encode=None):
    """A step of four micro-batches; the boundaries that the engine is told before each."""
    told = []
    engine.set_gradient_accumulation_boundary = told.append
    cache = GradCache(encode or engine, losses.InfoNCE(), micro_batch_size=4, module=engine)
    cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    return told


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_reduces_where_its_own_accumulation_ends(ends):
    engine = Engine(encoder())
    engine.is_gradient_accumulation_boundary = lambda: ends
    assert step_of(engine) == [False, False, False, ends]


def test_each_of_two_engines_reduces_after_its_own_last_micro_batch():
    engines, told = [Engine(encoder()), Engine(encoder())], ([], [])
    for engine, boundaries in zip(engines, told, strict=True):
        engine.set_gradient_accumulation_boundary = boundaries.append
    cache = GradCache(engines, losses.InfoNCE(), micro_batch_size=4)
    cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    assert told == ([False, True], [False, True])


def test_an_engine_that_a_function_hides_is_named():
    engine = Engine(encoder())
    hidden = {"model": engine}
    assert not wrappers_of(lambda part: hidden["model"](part))
    assert step_of(engine, lambda part: hidden["model"](part)) == [False, False, False, True]


def test_an_engine_is_given_a_float32_number():
    """It multiplies it by a loss scale, which float16 need not hold."""
    engine, given = Engine(encoder(torch.bfloat16, dropout=0.0)), []
    run = engine.backward
    engine.backward = lambda loss, **how: [given.append(loss.dtype), run(loss, **how)]
    cache = GradCache(engine, losses.InfoNCE(), micro_batch_size=4)
    cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.bfloat16))
    assert given == [torch.float32] * 4


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize(
    ("stage", "steps", "wanted"),
    [(1, 1, []), (2, 1, ["in", "out"]), (3, 1, ["in", "out"]), (2, 4, [])],
)
def test_an_engine_that_reduces_in_every_backward_pass_puts_it_off(stage, steps, wanted, able):
    """Where it can; an accumulation over steps has a way of its own."""
    engine, happened = Engine(encoder()), []

    @contextlib.contextmanager
    def coalesce():
        if not able:
            raise NotImplementedError
        happened.append("in")
        yield
        happened.append("out")

    run = engine.backward
    engine.backward = lambda *given, **how: [happened.append("pass"), run(*given, **how)]
    engine.zero_optimization_stage = lambda: stage
    engine.gradient_accumulation_steps = lambda: steps
    engine.coalesce_grad_reduction = coalesce
    step_of(engine)
    around = wanted if able else []
    assert happened == [*around[:1], *["pass"] * 4, *around[1:]]


WRAPPED = Engine(torch.nn.Linear(WIDTH, 2))


def of_a_global(part):
    return WRAPPED(part)


class Caller:
    """An object that is called, and one of whose methods is."""

    def __init__(self, module):
        self.module = module

    def __call__(self, part):
        return self.module(part)


@pytest.mark.parametrize(
    "encode",
    [
        WRAPPED,
        of_a_global,
        functools.partial(of_a_global),
        functools.partial(lambda model, part: model(part), WRAPPED),
        functools.partial(lambda part, model: model(part), model=WRAPPED),
        WRAPPED.forward,
        Caller(WRAPPED),
    ],
    ids=["module", "global", "partial", "argument", "keyword", "method", "object"],
)
def test_a_wrapper_is_found_in_what_encodes(encode):
    """Else its processes reduce after every micro-batch."""
    assert wrappers_of(encode) == [WRAPPED]


class Sharded(Failing):
    """Of a module in FSDP2 what says when it reduces."""

    def __init__(self, module, fails_at):
        super().__init__(module, fails_at)
        self.told, self.lasts, self.whole = {}, [], False

    def forward(self, x):
        found = super().forward(x)
        self.whole = False
        return found

    def set_requires_gradient_sync(self, now):
        self.told["sync"] = now

    def set_is_last_backward(self, now):
        self.told["last"] = now
        self.lasts.append(now)

    def unshard(self):
        self.whole = True

    def reshard(self):
        self.whole = False

    def set_reshard_after_backward(self, now):
        self.told["reshard"] = now


def test_a_step_that_failed_leaves_reductions_to_those_that_follow():
    sharded = Sharded(encoder(), fails_at=6)  # of the second pass
    cache = GradCache(sharded, losses.InfoNCE(), micro_batch_size=4)
    with pytest.raises(ValueError, match="token"):
        cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    assert sharded.told == {"sync": True, "last": True, "reshard": True}
    assert not sharded.whole


def test_a_loss_may_use_what_is_sharded():
    sharded, found = Sharded(encoder(), fails_at=None), []

    def loss(*vectors):
        found.append(sharded.whole)
        return fastsim.info_nce(*vectors)

    cache = GradCache(sharded, loss, micro_batch_size=4)
    cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    assert found == [True]


def test_shards_are_told_which_pass_is_the_last():
    sharded = Sharded(encoder(), fails_at=None)
    cache = GradCache(sharded, losses.InfoNCE(), micro_batch_size=4)
    cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    # After each pass it is left as other steps expect it.
    assert sharded.lasts == [False, True, False, True, False, True, True, True]


def test_what_was_gathered_is_released_where_somebody_interrupts(monkeypatch):
    released, module = [], encoder()
    monkeypatch.setattr(grad_cache, "reshard_after_error", released.append)

    def interrupted(part):
        raise KeyboardInterrupt

    cache = GradCache(interrupted, losses.InfoNCE(), micro_batch_size=4, module=module)
    with pytest.raises(KeyboardInterrupt):
        cache.backward(torch.randn(8, WIDTH))
    assert len(released) == 1


@pytest.mark.parametrize("fails_at", [None, 2])  # in the first pass
def test_buffers_are_sent_once_a_step(fails_at, alone, monkeypatch):
    """And by the next call after it, even if the step has failed."""
    sent, rows = [], torch.randn(8, WIDTH)
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.BatchNorm1d(5))
    wrapped = DistributedDataParallel(Failing(module, fails_at))
    monkeypatch.setattr(wrapped, "_sync_buffers", lambda: sent.append(1))
    cache = GradCache(wrapped, losses.InfoNCE(), micro_batch_size=4)
    with contextlib.nullcontext() if fails_at is None else pytest.raises(ValueError, match="token"):
        cache.backward(rows, rows)
    assert len(sent) == 1
    wrapped(rows)
    assert len(sent) == 2


def test_a_static_graph_is_refused_before_it_is_encoded(alone):
    """torch fails at the first backward pass that does not reduce, with an internal error."""
    module = Failing(encoder())
    wrapped = DistributedDataParallel(module, static_graph=True)
    for encode in (wrapped, lambda rows: wrapped(rows)):
        cache = GradCache(encode, losses.InfoNCE(), micro_batch_size=4)
        with pytest.raises(ValueError, match=r"^encode: wanted .* without static_graph"):
            cache.backward(*torch.randn(2, 8, WIDTH, dtype=torch.float64))
    assert module.calls == 0


def test_the_processes_of_an_engine_are_those_of_its_data(alone):
    engine, some = Engine(encoder()), dist.new_group([0])
    assert _group_of(engine) is alone
    engine.data_parallel_group = some
    assert _group_of(engine) is some
