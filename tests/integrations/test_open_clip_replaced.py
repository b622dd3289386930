"""ClipLoss and SigLipLoss where a method, a class or a function of open_clip has been replaced."""

import functools
import inspect

import pytest
import torch

pytest.importorskip(
    "fastsim.integrations.open_clip",
    reason="open_clip_torch is not installed",
    exc_type=ImportError,
)

from fastsim.integrations.open_clip import ClipLoss, SigLipLoss
from tests.integrations import open_clip_peer
from tests.integrations.open_clip_peer import arguments

peer = open_clip_peer.load()
PAIRS = {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}


def squared(self, *given, **options):
    """Logits of another kind; a tensor, or a pair of them."""
    logits = type(self).theirs.get_logits(self, *given, **options)
    return tuple(part**2 for part in logits) if isinstance(logits, tuple) else logits**2


def replaced(name, how):
    """(ours, theirs) whose logits are squared."""
    found = []
    for kind in (PAIRS[name], getattr(peer, name)):
        own = type(name, (kind,), {"theirs": getattr(peer, name)})
        if how == "subclass":
            own.get_logits = squared
        loss = own()
        if how == "object":
            loss.get_logits = functools.partial(squared, loss)
        found.append(loss)
    return found


@pytest.mark.parametrize("how", ["subclass", "object"])
@pytest.mark.parametrize("name", PAIRS)
def test_logits_that_are_replaced(name, how):
    image, text, scale, bias = arguments(True, (), True)
    ours, theirs = replaced(name, how)
    plain = PAIRS[name]()(image, text, scale, bias)
    with pytest.warns(UserWarning, match=f"{name}: get_logits has been replaced; open_clip's own"):
        value = ours(image, text, scale, bias)
    assert torch.equal(value, theirs(image, text, scale, bias))
    assert abs(value - plain) > 0.1
    ours(image, text, scale, bias)  # a second note would be an error


def test_a_patch_of_a_method_that_ours_overrides(monkeypatch):
    given = arguments(True, (), True)
    for name in PAIRS:
        plain, shipped = PAIRS[name]()(*given), getattr(peer, name).forward

        def halved(*given, shipped=shipped, **options):
            return shipped(*given, **options) / 2

        monkeypatch.setattr(getattr(peer, name), "forward", halved)
        with pytest.warns(UserWarning, match=f"{name}: forward has been replaced"):
            value = PAIRS[name]()(*given)
        assert torch.equal(value, getattr(peer, name)()(*given))
        torch.testing.assert_close(value, plain / 2)


def test_a_patch_of_their_class(monkeypatch):
    image, text, scale, _ = arguments(True, (), False)
    plain = ClipLoss()(image, text, scale)
    their_logits = peer.ClipLoss.get_logits

    def halved(self, *given, **options):
        return tuple(part / 2 for part in their_logits(self, *given, **options))

    monkeypatch.setattr(peer.ClipLoss, "get_logits", halved)
    with pytest.warns(UserWarning, match="get_logits has been replaced"):
        value = ClipLoss()(image, text, scale)
    assert torch.equal(value, peer.ClipLoss()(image, text, scale))
    assert abs(value - plain) > 0.1


def test_a_function_of_their_module_that_was_replaced(monkeypatch):
    image, text, scale, _ = arguments(True, (), False)
    monkeypatch.setattr(peer, "gather_features", lambda *given, **options: given)
    with pytest.warns(UserWarning, match="gather_features has been replaced; open_clip's own"):
        value = ClipLoss()(image, text, scale)
    assert torch.equal(value, peer.ClipLoss()(image, text, scale))


@pytest.mark.skipif(
    "use_horovod" not in inspect.signature(peer.ClipLoss).parameters,
    reason="an option of version 3",
)
def test_horovod_is_theirs():
    image, text, scale, _ = arguments(True, (), False)
    wanted = peer.ClipLoss(use_horovod=True)(image, text, scale)
    with pytest.warns(UserWarning, match="ClipLoss: use_horovod has no fused form; open_clip's"):
        loss = ClipLoss(use_horovod=True)(image, text, scale)
    assert torch.equal(loss, wanted)


def test_a_method_of_a_subclass_that_calls_ours():
    class Doubled(ClipLoss):
        def forward(self, *given, **options):
            return 2 * super().forward(*given, **options)

    image, text, scale, _ = arguments(True, (), False)
    torch.testing.assert_close(Doubled()(image, text, scale), 2 * ClipLoss()(image, text, scale))
