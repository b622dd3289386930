"""GradCache where one DistributedDataParallel holds more than its last micro-batch uses.

The hook of the wrapper makes gradients `FACTOR` times as large: a parameter that was not reduced
shows, and one that was twice.
"""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastsim
from fastsim.grad_cache import GradCache

FACTOR, ROWS, WIDTH = 3.0, (7, 5), 6


class Towers(torch.nn.Module):
    """Two encoders and the temperature of their loss, as CLIP has them."""

    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(WIDTH, 5), torch.nn.Linear(WIDTH, 5)
        self.temperature = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, tower, rows):
        return getattr(self, tower)(rows)


class Loss(torch.nn.Module):
    """InfoNCE by the temperature of the towers, its own parameter too, and a decay of a weight."""

    def __init__(self, towers):
        super().__init__()
        self.temperature, self.image = towers.temperature, towers.image

    def forward(self, images, texts):
        positives = torch.arange(len(images)) % len(texts)
        loss = fastsim.info_nce(images, texts, positives, temperature=self.temperature)
        return loss + self.image.weight.square().sum()


def reduced(module, **options):
    """The module in DistributedDataParallel, whose reduction is a product with `FACTOR`."""

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer() * FACTOR)
        return done

    wrapped = DistributedDataParallel(module, **options)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def by_hand(towers, columns):
    """{parameter: its gradient times `FACTOR`} of the plain step; those that get none left out."""
    towers = copy.deepcopy(towers)
    Loss(towers)(towers("image", columns[0]), towers("text", columns[1])).backward()
    pairs = towers.named_parameters()
    return {name: FACTOR * p.grad for name, p in pairs if p.grad is not None}


def check_steps(towers, encoders, loss):
    """Two steps: a reduction that has not ended is refused by the next."""
    columns = [torch.randn(rows, WIDTH) for rows in ROWS]
    wanted = by_hand(towers, columns)
    cache = GradCache(encoders, loss, micro_batch_size=2)
    for _ in range(2):
        cache.backward(*columns)
        found = {name: p.grad for name, p in towers.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
        towers.zero_grad()


@pytest.mark.parametrize("frozen", [None, "image", "text"])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=["plain", "unused", "views"],
)
@pytest.mark.parametrize("kind", ["module", "function"])
def test_both_towers_of_one_module_are_reduced(kind, options, frozen, alone):
    towers = Towers()
    if frozen is not None:
        getattr(towers, frozen).requires_grad_(False)
    wrapped, loss = reduced(towers, **options), Loss(towers)
    encoders = [lambda rows: wrapped("image", rows), lambda rows: wrapped("text", rows)]
    check_steps(towers, encoders, loss if kind == "module" else lambda *vectors: loss(*vectors))


def test_one_function_may_call_either_tower(alone):
    towers = Towers()
    wrapped = reduced(towers)
    columns = [{"tower": name, "rows": torch.randn(6, WIDTH)} for name in ("image", "text")]
    wanted = by_hand(towers, [column["rows"] for column in columns])
    GradCache(lambda part: wrapped(**part), Loss(towers), micro_batch_size=4).backward(*columns)
    for name, parameter in towers.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


class Image(torch.nn.Module):
    """The image tower and the temperature."""

    def __init__(self, towers):
        super().__init__()
        self.image, self.temperature = towers.image, towers.temperature

    def forward(self, rows):
        return self.image(rows)


@pytest.mark.parametrize("kept", [True, False])
def test_the_first_of_two_modules_holds_the_temperature(kept, alone):
    """kept: gradients of an earlier step are there as zeros."""
    towers = Towers()
    for parameter in towers.parameters() if kept else ():
        parameter.grad = torch.zeros_like(parameter)
    check_steps(towers, [reduced(Image(towers)), reduced(towers.text)], Loss(towers))


def test_steps_that_accumulate_are_reduced_at_the_last(alone):
    towers = Towers()
    wrapped, columns = reduced(towers), [torch.randn(rows, WIDTH) for rows in ROWS]
    encoders = [lambda rows: wrapped("image", rows), lambda rows: wrapped("text", rows)]
    cache = GradCache(encoders, Loss(towers), micro_batch_size=2)
    with wrapped.no_sync():
        cache.backward(*columns)
    cache.backward(*columns)
    for name, gradient in by_hand(towers, columns).items():
        found = towers.get_parameter(name).grad
        torch.testing.assert_close(found, 2 * gradient, rtol=1e-4, atol=1e-5)
