"""What a backend lacks of a kind is refused alone: the kind is served, the extra in the next."""

import pytest
import torch

import fastsim
from fastsim.backends import extras, get, pick
from fastsim.backends.extras import EXTRAS
from fastsim.backends.torch.backend import TorchBackend
from fastsim.groups import Ring
from fastsim.kinds import KINDS, LATE_INTERACTION, SELECTIONS
from fastsim.verify import checks, verdicts
from tests.backends.test_kinds import is_a_sentence
from tests.cases import CASES, call, inputs

BACKENDS = tuple(fastsim.backends())
NAMES = (*KINDS, *SELECTIONS, *LATE_INTERACTION)
CPU, META = torch.device("cpu"), torch.device("meta")


def of_tile(tile):
    """The extras that a tile needs of the backend that is given it, by what it holds."""
    pairs = tile.pairs
    needed = {
        extras.DOT: not tile.cosine,
        extras.ABOVE: pairs.exclude_above is not None,
        extras.GUIDE: pairs.guide is not None,
        extras.GUIDED_POSITIVES: pairs.guide is not None and pairs.positives is not None,
        extras.COLUMN_BIAS: pairs.column_bias is not None,
        extras.UNTARGETED: pairs.untargeted,
        extras.PARTS: pairs.offset != 0 or pairs.sliced,
        extras.TEACHER: pairs.factors is not None or pairs.row_shift is not None,
        extras.WEIGHED_POSITIVES: tile.positive_weights is not None,
    }
    return tuple(extra for extra, wanted in needed.items() if wanted)


class Bare(TorchBackend):
    """Kernels with no extra at all, which meet none."""

    name = "bare"
    extras = frozenset()
    automatic = False
    by_verdict = True

    def forward(self, tile, *sides, **options):
        assert of_tile(tile) == ()
        return super().forward(tile, *sides, **options)

    def fused_pass(self, tile, *others):
        assert of_tile(tile) == ()
        return super().fused_pass(tile, *others)

    def score_grad(self, tile, *others):
        assert of_tile(tile) == ()
        return super().score_grad(tile, *others)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """It is known, and no verdict is."""
    monkeypatch.setenv("FASTSIM_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    monkeypatch.setattr(verdicts, "_warned", set())
    known = fastsim.backends.__globals__["_BACKENDS"]
    backend = Bare()
    monkeypatch.setitem(fastsim.backends.__globals__, "_BACKENDS", {"bare": backend} | known)
    return backend


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", NAMES)
def test_served_or_refused_in_a_sentence(kind, name):
    backend, x = get(name), torch.randn(5, 4)
    for extra, sentence in EXTRAS.items():
        lacks = backend.unsupported_extra([extra])
        assert lacks == (None if extra in backend.extras else sentence)
        reason = lacks or backend.unsupported_reason(x, kind=kind)
        if reason is None:
            assert pick(name, x, kind=kind, extras=(extra,)) is backend
            continue
        assert is_a_sentence(reason)
        with pytest.raises(RuntimeError) as error:
            pick(name, x, kind=kind, extras=(extra,))
        assert reason in str(error.value)


def test_cuda_lacks_extras_of_a_kind_that_it_serves():
    assert "softmax" in get("cuda").kinds()
    assert get("cuda").unsupported_extra(()) is None
    assert {get("cuda").unsupported_extra([extra]) for extra in EXTRAS} == {*EXTRAS.values()}


@pytest.mark.parametrize("case", [case for case in CASES if case.tile], ids=repr)
def test_a_loss_names_what_it_needs(case, bare):
    """By name it is served as by the torch backend, or the extra is refused in its own words."""
    tensors, others, options = inputs(case, (5, 7, 4), torch.float32, seed=2)
    if not case.extras:
        mine, theirs = (
            call(case.loss, tensors, others, options | {"backend": name})[0]
            for name in ("bare", "torch")
        )
        assert torch.equal(mine, theirs)
        return
    with pytest.raises(RuntimeError) as error:
        call(case.loss, tensors, others, options | {"backend": "bare"})
    assert any(EXTRAS[extra] in str(error.value) for extra in case.extras)


@pytest.mark.parametrize("extra", EXTRAS)
def test_auto_takes_the_next_for_an_extra_alone(extra, bare):
    """With a good verdict of the kind: plain calls by these kernels, those with the extra not."""
    of = verdicts.key("bare", "softmax", torch.float32, META)
    verdicts.write(verdicts.now(True, None, 0.5, of))
    x = torch.empty(5, 4, device="meta")
    assert pick(None, x, kind="softmax") is bare
    assert pick(None, x, kind="softmax", extras=(extra,)) is get("torch")


def test_a_kind_is_verified_without_the_extras_that_are_lacking(bare):
    known = checks.problems("softmax", checks.SMALL[1], torch.float32)
    seen = {extra for problem in known for extra in problem.extras}
    # Of each that kernels have there is a problem that shows whether it is right.
    assert get("triton").extras | get("cuda").extras <= seen
    plain = checks.supported("bare", "softmax", checks.SMALL[1], torch.float32)
    assert plain == [] or all(problem.extras == () for problem in plain)
    assert "info_nce" in {problem.name for problem in plain}
    assert checks.refusal("bare", "softmax", torch.float32, CPU) is None


def test_a_ring_needs_its_parts():
    assert extras.extras_of_ring(Ring(None)) == (extras.PARTS,)
    assert extras.extras_of_ring(None) == ()
