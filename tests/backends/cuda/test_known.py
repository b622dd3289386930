"""Every loss whose kind and options the CUDA backend names as its own: its kernels know all of it.

Without its library: the torch backend computes, and asks of each tile what the CUDA passes would.
"""

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.cuda import backend as cuda_backend
from fastsim.backends.cuda import passes
from fastsim.backends.cuda.backend import CudaBackend
from fastsim.backends.torch.backend import TorchBackend
from fastsim.backends.triton import installed
from fastsim.backends.triton.backend import TritonBackend
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.cases import CASES, call, inputs


class Asking(TorchBackend):
    """With the name, kinds and extras of the CUDA backend, so that it refuses what that does."""

    name = "cuda"
    automatic = False
    extras = CudaBackend.extras
    kinds = CudaBackend.kinds

    def __init__(self):
        self.asked = []

    def unsupported_reason(self, *tensors, kind=None):
        return self.unsupported_kind(kind)

    def serves_one_call(self, *_):
        return False

    def _ask(self, tile):
        passes.check_tile(tile)
        self.asked.append(tile.kind)

    def forward(self, tile, *given, **options):
        self._ask(tile)
        return super().forward(tile, *given, **options)

    def fused_pass(self, tile, *given, **options):
        self._ask(tile)
        return super().fused_pass(tile, *given, **options)

    def score_grad(self, tile, *given, **options):
        self._ask(tile)
        return super().score_grad(tile, *given, **options)

    def closest(self, pairs, *given, **options):
        passes.check_closest(pairs)
        self.asked.append("closest")
        return super().closest(pairs, *given, **options)

    def hardest(self, *_):
        passes.refuse("it has no kernels of kind 'hardest'")


@pytest.fixture
def asking(monkeypatch):
    backend = Asking()
    known = get.__globals__["_BACKENDS"]
    monkeypatch.setitem(known, "cuda", backend)
    assert get("cuda") is backend
    return backend


@pytest.mark.parametrize("case", [case for case in CASES if case.tile], ids=repr)
def test_every_loss_that_it_names_is_known(case, asking):
    tensors, others, options = inputs(case, (13, 29, 18), torch.float32, seed=3)
    call(case.loss, tensors, others, options | {"backend": "cuda"})
    assert set(asking.asked) <= passes.KINDS
    assert asking.asked


def test_the_default_losses_are_served(asking):
    """Those that most people call, so that a refusal by design is not taken for an answer here."""
    x, y = (torch.randn(13, 8, requires_grad=True) for _ in "xy")
    for loss in (fastsim.info_nce, fastsim.siglip, fastsim.full_triplet, fastsim.cosent_matrix):
        loss(x, y, *([None] if loss is fastsim.cosent_matrix else []), backend="cuda").backward()
    fastsim.info_nce(x, y, symmetric=True, backend="cuda").backward()
    fastsim.sup_con(x, torch.arange(13) % 3, backend="cuda").backward()
    assert set(asking.asked) == passes.KINDS - {"squared_error"}


def test_a_small_batch_asks_for_the_device_of_its_tensors(monkeypatch):
    """Not for the current device, which may be full, or too old."""
    asked = []

    def reason(_, *tensors):
        asked.extend(tensors)

    monkeypatch.setattr(TritonBackend, "unsupported_reason", reason)
    monkeypatch.setattr(cuda_backend, "interpreting", lambda: False)
    monkeypatch.setattr(installed, "has_compiler", lambda: True)
    positives = torch.arange(5)
    tile = TileLoss("softmax", Pairs(positives))
    assert CudaBackend().serves_one_call(tile, 5, 7, 4, False, torch.float32)
    assert asked == [positives]


def test_a_small_batch_without_a_c_compiler_takes_the_cuda_kernels(monkeypatch):
    """Triton is installed and serves the device, but could not build a launcher."""
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda _, *tensors: None)
    monkeypatch.setattr(cuda_backend, "interpreting", lambda: False)
    tile = TileLoss("softmax", Pairs(torch.arange(5)))
    for found in (True, False):
        monkeypatch.setattr(installed, "has_compiler", lambda found=found: found)
        assert CudaBackend().serves_one_call(tile, 5, 7, 4, False, torch.float32) == found


def test_the_c_compilers_that_triton_takes(tmp_path, monkeypatch):
    has_compiler = installed.has_compiler.__wrapped__
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_compiler()
    program = tmp_path / "clang"
    program.touch()
    program.chmod(0o755)
    assert has_compiler()
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    assert not has_compiler()
    monkeypatch.setenv("CC", str(program))
    assert has_compiler()
