"""ClipLoss and SigLipLoss against open_clip's own, alone and in two processes.

Truth is their code in float64; ours may be off it by twice what theirs is in the same dtype, and by
twice what the rounding of the inputs moves it.
"""

import ast
import importlib.util
import inspect
import itertools
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "fastsim.integrations.open_clip",
    reason="open_clip_torch is not installed",
    exc_type=ImportError,
)

import fastsim
from fastsim.integrations import dtypes, open_clip
from fastsim.integrations.open_clip import ClipLoss, CoCaLoss, SigLipLoss
from fastsim.integrations.open_clip import features as scales
from tests.integrations import open_clip_peer
from tests.integrations.open_clip_peer import arguments, found_by
from tests.integrations.two_processes import WORLD, of_each_rank, share
from tests.measure import assert_close

peer = open_clip_peer.load()
PAIRS = {"ClipLoss": ClipLoss, "SigLipLoss": SigLipLoss}
NAMES = ("loss", "image gradient", "text gradient", "scale gradient", "bias gradient")


def results(loss, given, dtype):
    """(loss, gradients of what was given), everything in dtype."""
    leaves = [t if t is None else t.detach().to(dtype) for t in given]
    given = [t.requires_grad_() for t in leaves if t is not None]
    out = loss(*leaves, output_dict=True)["contrastive_loss"]
    return [out.detach(), *torch.autograd.grad(out, given)]


def compare(ours, theirs, truth, moved, score=0.0):
    """score: the size of a score; the scale's gradient is a sum of scores, which may cancel."""
    for name, mine, dense, exact, move in zip(NAMES, ours, theirs, truth, moved, strict=False):
        if name == "bias gradient" and exact.abs() < 1e-12:  # of a softmax: zero but for rounding
            assert mine == 0
        else:
            size = score if name == "scale gradient" else 0.0
            assert_close(name, mine, exact, dense, mine.dtype, size, move)


GRID = list(itertools.product(PAIRS, (True, False), ((), (1,)), (True, False)))


@pytest.mark.parametrize(("name", "unit", "scale_shape", "biased"), GRID)
def test_equals_theirs(name, unit, scale_shape, biased):
    given = arguments(unit, scale_shape, biased)
    compare(*found_by(results, PAIRS[name](), getattr(peer, name)(), given))


@pytest.mark.parametrize("name", PAIRS)
def test_eager_and_plain_numbers(name):
    """Without kernels, a scale that is a float, and the loss itself rather than a dictionary."""
    image, text, _, _ = arguments(False, (), False)
    wanted = getattr(peer, name)()(image, text, 14.3, -7.0)
    with fastsim.use_backend("eager"):
        torch.testing.assert_close(PAIRS[name]()(image, text, 14.3, -7.0), wanted)
    torch.testing.assert_close(PAIRS[name]()(image, text, 14.3, -7.0), wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_integers(name):
    image, text, _, _ = arguments(False, (), False)
    numbers = torch.tensor(14), torch.tensor([-7])
    wanted = getattr(peer, name)()(image, text, *numbers)
    torch.testing.assert_close(PAIRS[name]()(image, text, *numbers), wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_signatures(name):
    for method in ("__init__", "forward"):
        ours, theirs = (
            [(p.name, p.default) for p in inspect.signature(getattr(c, method)).parameters.values()]
            for c in (PAIRS[name], getattr(peer, name))
        )
        if name == "SigLipLoss" and method == "__init__" and ("chunk_size", 0) not in theirs:
            theirs.append(("chunk_size", 0))  # of version 4
        assert ours == theirs
    assert issubclass(PAIRS[name], getattr(peer, name))


def test_without_open_clip():
    code = (
        "import sys; sys.modules['open_clip'] = None\n"
        "try:\n    import fastsim.integrations.open_clip\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install open_clip_torch" in done.stdout


def test_refusals():
    with pytest.raises(ValueError, match="gather_with_grad: wanted True with local_loss"):
        ClipLoss(local_loss=True, world_size=2)
    ClipLoss(local_loss=True)  # one process gathers nothing
    with pytest.raises(ValueError, match="dist_impl: wanted one of"):
        SigLipLoss(dist_impl="ring")
    assert SigLipLoss(dist_impl="shift").dist_impl == "shift"
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="text_features: wanted 4 rows"):
        ClipLoss()(x, x[:2], 1.0)
    for scale in (float("nan"), torch.tensor(torch.inf)):
        with pytest.raises(ValueError, match="logit_scale: wanted a finite number"):
            ClipLoss()(x, x, scale)
        assert peer.ClipLoss()(x, x, scale).isnan()
    with pytest.raises(ValueError, match="logit_scale: wanted one element"):
        ClipLoss()(x, x, torch.ones(2))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_16_bit_features(name, dtype, autocast):
    """Their dtype, and at most the error of rounding to it: theirs rounds every logit too."""
    given = [t if t is None else t.to(dtype) for t in arguments(True, (), True, rows=64, width=32)]
    given[2] = torch.tensor(100.0).to(dtype)
    truth = results(getattr(peer, name)(), given, torch.float64)
    with torch.autocast("cpu", dtype, enabled=autocast):
        mine = results(PAIRS[name](), given, dtype)
        rounded = results(getattr(peer, name)(), given, dtype)
    assert mine[0].dtype == rounded[0].dtype
    assert (mine[0] - truth[0]).abs() <= torch.finfo(mine[0].dtype).eps * 1.01 * truth[0]
    for our_grad, their_grad, exact in zip(mine[1:3], rounded[1:3], truth[1:3], strict=True):
        ours_off, theirs_off = ((g - exact).norm() for g in (our_grad, their_grad))
        assert ours_off < theirs_off


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_features_of_two_dtypes(name, autocast):
    """The dtype of theirs, which takes them under autocast alone, and the value of the wider, or
    of that of autocast.
    """
    image, text, scale, bias = arguments(True, (), True)
    image = image.bfloat16()
    wider = text.bfloat16().float() if autocast else text
    wanted = PAIRS[name]()(image.float(), wider, scale, bias)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = PAIRS[name]()(image, text, scale, bias)
        dtype = getattr(peer, name)()(image, text, scale, bias).dtype if autocast else wanted.dtype
    assert value.dtype == dtype
    torch.testing.assert_close(value, wanted.to(dtype))


@pytest.mark.parametrize("name", PAIRS)
def test_the_dtype_does_not_depend_on_an_earlier_loss(name, monkeypatch):
    """One whose scale was a tensor, and now its bias is."""
    monkeypatch.setattr(dtypes, "_known", {})
    image, text, _, _ = arguments(True, (), True)
    sides = image.bfloat16(), text.bfloat16()
    PAIRS[name]()(*sides, torch.tensor([14.3]), -7.0)
    given = *sides, 14.3, torch.tensor([-7.0])
    assert PAIRS[name]()(*given).dtype == getattr(peer, name)()(*given).dtype


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("read", [True, False], ids=["read", "as on a GPU"])
@pytest.mark.parametrize("scale", [-3.0, 0.0, 14.3])
def test_scale_of_any_sign(name, scale, read, monkeypatch):
    monkeypatch.setattr(scales, "_is_read", lambda scale: read)
    image, text, _, bias = arguments(False, (), True)
    given = image, text, torch.tensor(scale), bias
    compare(
        *found_by(results, PAIRS[name](), getattr(peer, name)(), given),
        score=(image @ text.T).abs().mean().item(),
    )
    monkeypatch.undo()  # a number is always looked at
    number = PAIRS[name]()(image, text, scale, bias)
    torch.testing.assert_close(number, getattr(peer, name)()(image, text, scale, bias))


@pytest.mark.parametrize("name", PAIRS)
def test_no_rows(name):
    none = torch.zeros(0, 4)
    ours, theirs = (kind(none, none, 1.0, 0.0) for kind in (PAIRS[name](), getattr(peer, name)()))
    assert ours.isnan()
    assert theirs.isnan()


# ---- their other names ----


def test_coca():
    image, text, scale, _ = arguments(True, (), False)
    logits, labels = torch.randn(33, 5, 11), torch.randint(0, 11, (33, 5))
    for output_dict in (False, True):
        ours, theirs = (
            kind(2.0, 1.5)(image, text, logits, labels, scale, output_dict)
            for kind in (CoCaLoss, peer.CoCaLoss)
        )
        torch.testing.assert_close(ours, theirs)
    assert isinstance(CoCaLoss(1.0, 1.0), ClipLoss)
    without = CoCaLoss(1.0, 0.0)(image, text, logits, labels, scale)
    torch.testing.assert_close(without, peer.CoCaLoss(1.0, 0.0)(image, text, logits, labels, scale))


def their_factory(kinds):
    """open_clip.factory.create_loss alone, which makes losses of `kinds`."""
    folder = importlib.util.find_spec("open_clip").submodule_search_locations[0]
    tree = ast.parse(Path(folder, "factory.py").read_text())
    tree.body = [n for n in tree.body if getattr(n, "name", None) == "create_loss"]
    names = dict(vars(kinds))
    exec(compile(tree, "factory.py", "exec"), names)
    return types.SimpleNamespace(create_loss=names["create_loss"], __name__="open_clip")


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        ("ClipLoss", {}),
        ("SigLipLoss", {"siglip": True}),
        ("CoCaLoss", {"model": "coca_ViT-B-32"}),
        ("DistillClipLoss", {"distill": True}),
    ],
)
def test_create_loss(wanted, options, monkeypatch):
    args = {"model": "ViT-B-32", "siglip": False, "distill": False, "horovod": False}
    args |= {"rank": 1, "world_size": 2, "loss_dist_impl": "shift"}
    args |= {"local_loss": True, "gather_with_grad": True}
    args |= {"coca_caption_loss_weight": 2.0, "coca_contrastive_loss_weight": 1.0}
    args = types.SimpleNamespace(**args | options)
    monkeypatch.setattr(open_clip.peer, "package", lambda: their_factory(peer))
    ours, theirs = open_clip.create_loss(args), their_factory(peer).create_loss(args)
    assert type(ours) is getattr(open_clip, wanted)
    assert isinstance(ours, type(theirs))
    mine, wanted_state = ({**vars(x), "_modules": 0} for x in (ours, theirs))
    assert mine == wanted_state
    if wanted == "ClipLoss":
        args.gather_with_grad = False
        with pytest.raises(ValueError, match="gather_with_grad: wanted True"):
            open_clip.create_loss(args)


# ---- two processes ----

LOCAL = 11  # rows of a rank
CLIP_CASES = [
    {"local_loss": local, "gather_with_grad": grad}
    for local, grad in ((False, False), (False, True), (True, True))
]
SIGLIP_CASES = [{"dist_impl": name} for name in (None, "bidir", "shift", "reduce", "gather")]
CASES = [("ClipLoss", o) for o in CLIP_CASES] + [("SigLipLoss", o) for o in SIGLIP_CASES]
WRONG = ("ClipLoss", {"local_loss": True, "gather_with_grad": False})


def everything():
    return arguments(True, (), True, rows=WORLD * LOCAL, seed=9)


def work(rank):
    """What came of every case on this rank, and of the wrong one last."""
    image, text, scale, bias = everything()
    given = share(image, rank, LOCAL), share(text, rank, LOCAL), scale, bias
    process = {"rank": rank, "world_size": WORLD}
    found = []
    for name, options in CASES:
        theirs = getattr(open_clip_peer.load(), name)(**options, **process)
        ours = PAIRS[name](**options, **process)
        found.append(found_by(results, ours, theirs, given))
    wrong = open_clip_peer.load().ClipLoss(**WRONG[1], **process)
    return [*found, results(wrong, given, torch.float64)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found: per case as of `found_by`, and the wrong one last."""
    return of_each_rank(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_two_processes_equal_theirs(ranks, index):
    for found in ranks:
        compare(*found[index])


def test_two_processes_equal_one(ranks):
    """The mean of the ranks' gradients is that of the whole batch, as DDP makes it."""
    whole = everything()
    for name, loss in PAIRS.items():
        truth = results(getattr(peer, name)(), whole, torch.float64)
        options = {"local_loss": True, "gather_with_grad": True} if loss is ClipLoss else {}
        index = next(
            i for i, (n, o) in enumerate(CASES) if n == name and (o == options or not options)
        )
        for rank, found in enumerate(ranks):
            image, text = (grad / WORLD for grad in found[index][0][1:3])
            torch.testing.assert_close(
                image, share(truth[1], rank, LOCAL).float(), rtol=1e-5, atol=1e-7
            )
            torch.testing.assert_close(
                text, share(truth[2], rank, LOCAL).float(), rtol=1e-5, atol=1e-7
            )


def test_what_is_refused_is_wrong_there(ranks):
    """local_loss without gather_with_grad: no positive multiple of the whole batch's gradient."""
    truth = results(peer.ClipLoss(), everything(), torch.float64)
    right = CASES.index(("ClipLoss", {"local_loss": True, "gather_with_grad": True}))
    for rank, found in enumerate(ranks):
        exact = share(truth[1], rank, LOCAL)
        ours, theirs = (
            torch.nn.functional.cosine_similarity(grad.double(), exact, dim=1).min()
            for grad in (found[right][0][1], found[-1][1])
        )
        assert ours > 1 - 1e-10
        assert theirs < 0.99
