"""DistillClipLoss against open_clip's own, alone and in two processes.

Truth is their code in float64; ours may be off it by twice what theirs is in the same dtype, and by
twice what the rounding of the inputs moves it.
"""

import contextlib
import inspect
import math

import pytest
import torch

pytest.importorskip(
    "fastsim.integrations.open_clip",
    reason="open_clip_torch is not installed",
    exc_type=ImportError,
)

import fastsim
from fastsim.engine import one_call
from fastsim.integrations import overrides
from fastsim.integrations.open_clip import ClipLoss, DistillClipLoss
from fastsim.integrations.open_clip import features as scales
from tests.integrations import open_clip_peer
from tests.integrations.open_clip_peer import features, found_by
from tests.integrations.two_processes import WORLD, of_each_rank, share
from tests.measure import assert_close

peer = open_clip_peer.load()
RESULTS = (
    *("contrastive loss", "distillation loss"),
    *("image gradient", "text gradient", "scale gradient"),
)
SCALES = 14.3, 31.0  # of the student's logits and of the teacher's


def arguments(*, unit=True, scale_shape=(), rows=33, width=20, scales=SCALES, seed=7):
    """The student's features and scale, and the teacher's, which are wider."""
    student, teacher = (
        [features(rows, wide, unit=unit, seed=seed + k + wide) for k in range(2)]
        for wide in (width, width + 9)
    )
    own, taught = (torch.full(scale_shape, scale) for scale in scales)
    return *student, own, *teacher, taught


def results(loss, given, dtype):
    """Both losses, and the gradients of the student's arguments by a sum of them."""
    given = [tensor.detach().to(dtype) for tensor in given]
    learnt = [tensor.requires_grad_() for tensor in given[:3]]
    contrastive, distilled = loss(*given)
    grads = torch.autograd.grad(0.7 * contrastive + 1.9 * distilled, learnt)
    return [contrastive.detach(), distilled.detach(), *grads]


def compare(ours, theirs, truth, moved, score=0.0):
    """score: the size of a score; the scale's gradient is a sum of scores, which may cancel."""
    for name, mine, dense, exact, move in zip(RESULTS, ours, theirs, truth, moved, strict=True):
        size = score if name == "scale gradient" else 0.0
        assert_close(name, mine, exact, dense, mine.dtype, size, move)


def size_of_scores(given):
    return (given[0] @ given[1].T).abs().mean().item()


def check(given):
    found = found_by(results, DistillClipLoss(), peer.DistillClipLoss(), given)
    compare(*found, score=size_of_scores(given))


@pytest.mark.parametrize("panels", [False, True], ids=["one call", "panels"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "eager"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_equals_theirs(scale_shape, unit, backend, panels):
    given = arguments(unit=unit, scale_shape=scale_shape)
    how = one_call.in_panels if panels else contextlib.nullcontext
    with fastsim.use_backend(backend), how():
        check(given)


def test_panels_of_a_large_batch():
    given = arguments(rows=1100, width=33, scales=(50.0, 100.0))
    check(given)


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows(rows):
    given = arguments(rows=rows)
    check(given)


def test_a_teacher_who_is_sure():
    """Its entropy is 0; neither loss is below 0 by more than its own rounding."""
    given = arguments(scales=(14.3, 1e4))
    check(given)
    same = torch.nn.functional.normalize(torch.eye(9))
    _, distilled = DistillClipLoss()(same, same, 1e3, same, same, 1e3)
    assert abs(distilled) <= torch.finfo(torch.float32).eps * math.log(9)


def test_what_is_returned():
    given = arguments()
    losses = DistillClipLoss()(*given)
    named = DistillClipLoss()(*given, output_dict=True)
    assert isinstance(losses, tuple)
    assert list(named) == list(peer.DistillClipLoss()(*given, output_dict=True))
    assert all(torch.equal(*pair) for pair in zip(losses, named.values(), strict=True))
    numbers = [value.item() if value.ndim == 0 else value for value in given]
    for ours, theirs in zip(losses, peer.DistillClipLoss()(*numbers), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_signature():
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(kind.forward).parameters.values()]
        for kind in (DistillClipLoss, peer.DistillClipLoss)
    )
    assert ours == theirs
    assert issubclass(DistillClipLoss, peer.DistillClipLoss)


def test_refusals():
    image, text, scale, *teacher = arguments()
    with pytest.raises(ValueError, match="text_features: wanted 33 rows"):
        DistillClipLoss()(image, text[:2], scale, *teacher)
    with pytest.raises(ValueError, match="dist_text_features: wanted 33 rows"):
        DistillClipLoss()(image, text, scale, teacher[0], teacher[1][:2], teacher[2])
    with pytest.raises(ValueError, match="dist_image_features: wanted 33 rows, as many as image_"):
        DistillClipLoss()(image, text, scale, teacher[0][:2], teacher[1][:2], teacher[2])
    with pytest.raises(ValueError, match="dist_logit_scale: wanted a finite number"):
        DistillClipLoss()(image, text, scale, *teacher[:2], math.inf)


def test_no_rows():
    none = torch.zeros(0, 4)
    for kind in (DistillClipLoss, peer.DistillClipLoss):
        contrastive, distilled = kind()(none, none, 1.0, none, none, 1.0)
        assert contrastive.isnan()
        assert distilled.isnan()


@pytest.mark.parametrize("read", [True, False], ids=["read", "as on a GPU"])
@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (0, 1), (1, 0)])
def test_scales_of_any_sign(signs, read, monkeypatch):
    monkeypatch.setattr(scales, "_is_read", lambda scale: read)
    given = arguments(
        unit=False, scales=[sign * scale for sign, scale in zip(signs, SCALES, strict=True)]
    )
    check(given)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_features(dtype, autocast):
    """Their dtype, and at most the error of rounding to it: theirs rounds every logit too."""
    given = [tensor.to(dtype) for tensor in arguments(rows=64, width=32, scales=(100.0, 100.0))]
    truth = results(peer.DistillClipLoss(), given, torch.float64)
    with torch.autocast("cpu", dtype, enabled=autocast):
        mine = results(DistillClipLoss(), given, dtype)
        rounded = results(peer.DistillClipLoss(), given, dtype)
    for our_loss, their_loss, exact in zip(mine[:2], rounded[:2], truth[:2], strict=True):
        assert our_loss.dtype == their_loss.dtype
        assert (our_loss - exact).abs() <= torch.finfo(our_loss.dtype).eps * 1.01 * exact
    for our_grad, their_grad, exact in zip(mine[2:4], rounded[2:4], truth[2:4], strict=True):
        ours_off, theirs_off = ((grad - exact).norm() for grad in (our_grad, their_grad))
        assert ours_off < theirs_off


# ---- what has no fused form ----


def test_a_teacher_that_learns():
    given = [tensor.requires_grad_() for tensor in arguments()]
    with pytest.warns(UserWarning, match="DistillClipLoss: a gradient of the teacher's features"):
        ours = DistillClipLoss()(*given)
    theirs = peer.DistillClipLoss()(*given)
    assert torch.equal(ours[1], theirs[1])
    found, wanted = (torch.autograd.grad(sum(losses), given) for losses in (ours, theirs))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    with torch.no_grad():  # nothing learns: it is fused, and a note would be an error
        overrides._warned.clear()
        losses = DistillClipLoss()(*given)
    torch.testing.assert_close(losses, ours)


def test_metrics_are_those_of_the_contrastive_loss():
    """The teacher's scores have no positives."""
    given, found = arguments(), []
    for loss, inputs in ((ClipLoss(), given[:3]), (DistillClipLoss(), given)):
        with fastsim.metrics() as seen:
            loss(*inputs)
        found.append(seen.read())
    assert found[0] == found[1]


def test_a_loss_that_is_replaced():
    class Halved(DistillClipLoss):
        def dist_loss(self, *logits):
            return super().dist_loss(*logits) / 2

    given = arguments()
    with pytest.warns(UserWarning, match="Halved: dist_loss has been replaced; open_clip's own"):
        value = Halved()(*given)[1]
    torch.testing.assert_close(value, DistillClipLoss()(*given)[1] / 2)


# ---- two processes ----

LOCAL = 11  # rows of a rank
CASES = [
    {"local_loss": local, "gather_with_grad": grad}
    for local, grad in ((False, False), (False, True), (True, True))
]


def work(rank):
    """What came of every case on this rank."""
    whole = arguments(rows=WORLD * LOCAL)
    given = [share(value, rank, LOCAL) if value.ndim else value for value in whole]
    found = []
    for options in CASES:
        options = options | {"rank": rank, "world_size": WORLD}
        ours, theirs = (kind(**options) for kind in (DistillClipLoss, peer.DistillClipLoss))
        found.append((*found_by(results, ours, theirs, given), size_of_scores(given)))
    return found


def test_two_processes_equal_theirs(tmp_path):
    for found in of_each_rank(work, tmp_path):
        assert len(found) == len(CASES)
        for of_case in found:
            compare(*of_case)
