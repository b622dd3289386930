"""ClipLoss and SigLipLoss against open_clip's own, alone and in two processes.

Truth is their code in float64; ours may be off it by twice what theirs is in the same dtype.
"""

import inspect
import itertools
import subprocess
import sys
import warnings

import pytest
import torch

import fastsim
from fastsim.integrations.open_clip import ClipLoss, SigLipLoss
from tests.integrations import open_clip_peer
from tests.measure import assert_close

peer = open_clip_peer.load()
pytestmark = pytest.mark.skipif(peer is None, reason="open_clip_torch is not installed")

PAIRS = {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}
NAMES = ("loss", "image gradient", "text gradient", "scale gradient", "bias gradient")


def features(rows, width, *, unit, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return torch.nn.functional.normalize(x) if unit else 0.3 * x


def results(loss, image, text, scale, bias, dtype):
    """(loss, gradients of what was given), everything in dtype."""
    leaves = [t if t is None else t.detach().to(dtype) for t in (image, text, scale, bias)]
    given = [t.requires_grad_() for t in leaves if t is not None]
    out = loss(*leaves, output_dict=True)["contrastive_loss"]
    return [out.detach(), *torch.autograd.grad(out, given)]


def compare(ours, theirs, truth):
    for name, mine, dense, exact in zip(NAMES, ours, theirs, truth, strict=False):
        if name == "bias gradient" and exact.abs() < 1e-12:  # of a softmax: zero but for rounding
            assert mine == 0
        else:
            assert_close(name, mine, exact, dense, mine.dtype)


def arguments(name, unit, scale_shape, biased, *, rows=33, width=20, seed=5):
    image, text = (features(rows, width, unit=unit, seed=seed + k) for k in range(2))
    scale = torch.full(scale_shape, 14.3)
    bias = torch.tensor(-7.0) if biased else None
    return image, text, scale, bias


GRID = list(itertools.product(PAIRS, (True, False), ((), (1,)), (True, False)))


@pytest.mark.parametrize(("name", "unit", "scale_shape", "biased"), GRID)
def test_equals_theirs(name, unit, scale_shape, biased):
    given = arguments(name, unit, scale_shape, biased)
    ours, theirs = PAIRS[name](), getattr(peer, name)()
    compare(
        results(ours, *given, torch.float32),
        results(theirs, *given, torch.float32),
        results(theirs, *given, torch.float64),
    )


@pytest.mark.parametrize("name", PAIRS)
def test_eager_and_plain_numbers(name):
    """Without kernels, a scale that is a float, and the loss itself rather than a dictionary."""
    image, text, _, _ = arguments(name, False, (), False)
    wanted = getattr(peer, name)()(image, text, 14.3, -7.0)
    with fastsim.use_backend("eager"):
        torch.testing.assert_close(PAIRS[name]()(image, text, 14.3, -7.0), wanted)
    torch.testing.assert_close(PAIRS[name]()(image, text, 14.3, -7.0), wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_signatures(name):
    for method in ("__init__", "forward"):
        ours, theirs = (
            [(p.name, p.default) for p in inspect.signature(getattr(c, method)).parameters.values()]
            for c in (PAIRS[name], getattr(peer, name))
        )
        assert ours == theirs


def test_needs_no_open_clip():
    code = (
        "import sys; sys.modules['open_clip'] = None\n"
        "import torch\nfrom fastsim.integrations.open_clip import ClipLoss\n"
        "print(ClipLoss()(torch.eye(3), torch.eye(3), 1.0).item() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_refusals():
    with pytest.raises(ValueError, match="use_horovod: wanted False"):
        ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="gather_with_grad: wanted True with local_loss"):
        ClipLoss(local_loss=True, world_size=2)
    with pytest.raises(ValueError, match="dist_impl: wanted one of"):
        SigLipLoss(dist_impl="ring")
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="text_features: wanted 4 rows"):
        ClipLoss()(x, x[:2], 1.0)
    with pytest.raises(ValueError, match="logit_scale: wanted a positive"):
        ClipLoss()(x, x, -1.0)
    with pytest.raises(ValueError, match="logit_scale: wanted one element"):
        ClipLoss()(x, x, torch.ones(2))


@pytest.mark.parametrize("name", PAIRS)
def test_bfloat16_features(name):
    """Theirs rounds every logit to 8 bits; ours are float32 whatever the features."""
    given = [
        t if t is None else t.bfloat16() for t in arguments(name, True, (), True, rows=64, width=32)
    ]
    given[2] = torch.tensor(100.0).bfloat16()
    ours, theirs = PAIRS[name](), getattr(peer, name)()
    truth = results(theirs, *given, torch.float64)
    mine = results(ours, *given, torch.bfloat16)
    rounded = results(theirs, *given, torch.bfloat16)
    assert mine[0].dtype == torch.float32
    assert abs(mine[0] - truth[0]) < 1e-5 * truth[0]
    assert abs(rounded[0] - truth[0]) > 1e-4 * truth[0]
    for our_grad, their_grad, exact in zip(mine[1:3], rounded[1:3], truth[1:3], strict=True):
        ours_off, theirs_off = ((g - exact).norm() for g in (our_grad, their_grad))
        assert ours_off < theirs_off


# ---- two processes ----

WORLD, LOCAL = 2, 11
CLIP_CASES = [
    {"local_loss": local, "gather_with_grad": grad}
    for local, grad in ((False, False), (False, True), (True, True))
]
SIGLIP_CASES = [{"dist_impl": name} for name in (None, "bidir", "shift", "reduce", "gather")]
CASES = [("ClipLoss", o) for o in CLIP_CASES] + [("SigLipLoss", o) for o in SIGLIP_CASES]
WRONG = ("ClipLoss", {"local_loss": True, "gather_with_grad": False})


def share(tensor, rank):
    return tensor[rank * LOCAL : (rank + 1) * LOCAL]


def everything():
    return arguments("both", True, (), True, rows=WORLD * LOCAL, seed=9)


def work(rank, folder):
    """Every case on this rank; what came of it goes to a file."""
    warnings.simplefilter("ignore")  # their collectives are deprecated in torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    image, text, scale, bias = everything()
    given = share(image, rank), share(text, rank), scale, bias
    found = []
    for name, options in CASES:
        process = {"rank": rank, "world_size": WORLD}
        theirs = getattr(open_clip_peer.load(), name)(**options, **process)
        ours = PAIRS[name](**options, **process)
        found.append(
            (
                results(ours, *given, torch.float32),
                results(theirs, *given, torch.float32),
                results(theirs, *given, torch.float64),
            )
        )
    wrong = open_clip_peer.load().ClipLoss(**WRONG[1], rank=rank, world_size=WORLD)
    found.append(results(wrong, *given, torch.float64))
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found: per case (ours, theirs, theirs in float64), and the wrong one last."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_two_processes_equal_theirs(ranks, index):
    for found in ranks:
        compare(*found[index])


def test_two_processes_equal_one(ranks):
    """The mean of the ranks' gradients is that of the whole batch, as DDP makes it."""
    whole = everything()
    for name, loss in PAIRS.items():
        truth = results(getattr(peer, name)(), *whole, torch.float64)
        options = {"local_loss": True, "gather_with_grad": True} if loss is ClipLoss else {}
        index = next(
            i for i, (n, o) in enumerate(CASES) if n == name and (o == options or not options)
        )
        for rank, found in enumerate(ranks):
            image, text = (grad / WORLD for grad in found[index][0][1:3])
            torch.testing.assert_close(image, share(truth[1], rank).float(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(text, share(truth[2], rank).float(), rtol=1e-5, atol=1e-7)


def test_what_is_refused_is_wrong_there(ranks):
    """local_loss without gather_with_grad: no positive multiple of the whole batch's gradient."""
    truth = results(peer.ClipLoss(), *everything(), torch.float64)
    right = CASES.index(("ClipLoss", {"local_loss": True, "gather_with_grad": True}))
    for rank, found in enumerate(ranks):
        exact = share(truth[1], rank)
        ours, theirs = (
            torch.nn.functional.cosine_similarity(grad.double(), exact, dim=1).min()
            for grad in (found[right][0][1], found[-1][1])
        )
        assert ours > 1 - 1e-10
        assert theirs < 0.99
