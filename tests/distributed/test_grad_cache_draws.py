"""Random draws of GradCache: the same in both passes, others in the next step."""

import torch

import fastsim
from fastsim import losses
from fastsim.grad_cache import GradCache
from tests.distributed.layers import WIDTH, encoder
from tests.distributed.test_grad_cache import gradients, plain


def test_dropout_is_drawn_anew_for_every_step():
    encode, x = encoder(), torch.randn(8, WIDTH, dtype=torch.float64)
    cache = GradCache(encode, losses.InfoNCE(), micro_batch_size=4)
    assert cache.backward(x, x) != cache.backward(x, x)


class Device:
    """What torch has of a type of device: a generator, as `torch.mps` and `torch.xpu` do."""

    def __init__(self):
        self.generator = torch.Generator()
        self.begun = True

    def is_initialized(self):
        return self.begun

    def get_rng_state(self):
        assert self.begun
        return self.generator.get_state()

    def set_rng_state(self, state):
        self.generator.set_state(state)


def test_draws_on_another_device_are_the_same_in_both_passes(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "mps", device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    encode, loss = encoder(dropout=0.0), losses.InfoNCE()

    def dropped(part):
        kept = torch.rand(part.shape, generator=device.generator) > 0.5
        return encode(part * kept)

    columns = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    start = device.get_rng_state()
    plain(dropped, loss, columns, 4)
    wanted, after = gradients(encode), device.get_rng_state()
    device.set_rng_state(start)
    GradCache(dropped, loss, micro_batch_size=4, module=encode).backward(*columns)
    for got, want in zip(gradients(encode), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert torch.equal(device.get_rng_state(), after)
    device.begun = False  # nothing asks it for what it has not begun
    GradCache(encode, loss, micro_batch_size=4).backward(*columns)


def test_draws_go_on_after_those_of_the_loss():
    x, states = torch.randn(8, WIDTH, dtype=torch.float64), []

    def loss(*vectors):
        value = fastsim.info_nce(*vectors) * torch.rand(())
        states.append(torch.get_rng_state())
        return value

    GradCache(encoder(), loss, micro_batch_size=4).backward(x, x)
    assert torch.equal(torch.get_rng_state(), states[0])
