"""No loss waits for its device between the call and the end of backward.

Shown on tensors of the `meta` device, which hold no values: `.item()`, `.tolist()`, `nonzero` and
`bool()` raise there, and so does a tensor on another device.
"""

import inspect
import sys

import pytest
import torch

import fastsim
from fastsim import losses
from tests.cases import CASES, inputs, on_backend

REDUCTIONS = ("mean", "none")
# The levels of a target matrix are looked for, and waited for, unless they are given.
_SOFT = [-1.0, -0.5, 0.0, 0.5, 1.0]
LEVELS = {"cosent_matrix-soft": _SOFT, "cosent_matrix-dot": _SOFT}


def on_meta(value):
    """Tensors, in tuples too, without their values."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return tuple(map(on_meta, value)) if isinstance(value, tuple) else value


def prepared(case, dtype, shape=(13, 29, 18)):
    """(embeddings, other arguments, options) on the meta device."""
    tensors, others, options = inputs(case, shape, dtype, seed=3)
    tensors = [None if t is None else t.to("meta").requires_grad_() for t in tensors]
    options = {name: on_meta(value) for name, value in options.items()}
    if case.name in LEVELS:
        options["levels"] = torch.tensor(LEVELS[case.name], device="meta")
    if "largest_group" in case.loss.__kwdefaults__:
        options["largest_group"] = shape[0]
    return tensors, [on_meta(other) for other in others], options


def run(loss, tensors, others, options):
    value = loss(*tensors, *others, **options)
    value.sum().backward()
    for tensor in tensors:
        assert tensor is None or tensor.grad.device.type == "meta"
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_loss(case, reduction, dtype):
    tensors, others, options = prepared(case, dtype)
    options |= on_backend(case, "torch")
    if case.reduces:
        options["reduction"] = reduction
    run(case.loss, tensors, others, options)


@pytest.mark.parametrize("name", ["temperature", "scale", "bias"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_learnt_numbers(case, name):
    parameters = inspect.signature(case.loss).parameters
    if name not in parameters or parameters[name].default is None:
        return
    tensors, others, options = prepared(case, torch.float32)
    options[name] = torch.ones((), device="meta", requires_grad=True)
    options |= {"backend": "torch"}
    run(case.loss, tensors, others, options)
    assert options[name].grad.device.type == "meta"


@pytest.mark.parametrize("name", ["cosine_similarity", "paired_cosine_similarity", "mean_negative"])
def test_scores(name):
    x, y = (torch.empty(7, 6, device="meta", requires_grad=True) for _ in range(2))
    getattr(fastsim, name)(x, y, backend="torch").sum().backward()


@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_selection(mining):
    x, y = (torch.empty(7, 6, device="meta", requires_grad=True) for _ in range(2))
    fastsim.closest_negative(x, y, mining=mining, backend="torch")[0].sum().backward()
    fastsim.top_k(x, y, 3, backend="torch")


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("loss", [losses.batch_semi_hard_triplet, losses.batch_all_triplet])
def test_batch_triplets(loss, distance):
    x = torch.empty(7, 6, device="meta", requires_grad=True)
    groups = torch.zeros(7, dtype=torch.int64, device="meta")
    run(loss, [x], [groups], {"distance": distance, "largest_group": 7, "backend": "torch"})


@pytest.mark.parametrize("loss", ["sup_con", "nt_xent", "multi_similarity"])
def test_references(loss):
    x, y = (torch.empty(n, 6, device="meta", requires_grad=True) for n in (7, 9))
    groups = [torch.zeros(n, dtype=torch.int64, device="meta") for n in (7, 9)]
    run(getattr(fastsim, loss), [x], [groups[0], y, groups[1]], {"backend": "torch"})


def test_a_wait_would_show():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty((), device="meta").item()


@pytest.mark.parametrize("backend", ["cpu", "torch", "eager"])
def test_levels_that_are_given(backend, usable, monkeypatch):
    """With targets in bands, of which the first alone has one of the levels, or an unknown one."""
    usable(backend)
    monkeypatch.setattr(sys.modules[fastsim.cosent_matrix.__module__], "BAND", 10)
    x, y = torch.randn(7, 6), torch.randn(9, 6)
    targets = torch.randint(-1, 1, (7, 9)).float()
    targets[0, 0] = 2.0
    options = {"scale": 1.0, "backend": backend}  # so that no pair outweighs the others
    given = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    wanted = fastsim.cosent_matrix(x, y, targets, **options)
    got = fastsim.cosent_matrix(x, y, targets, levels=given, **options)
    torch.testing.assert_close(got, wanted)
    strided = torch.stack([given, given], 1)[:, 0]
    assert torch.equal(fastsim.cosent_matrix(x, y, targets, levels=strided, **options), got)
    targets[0, 0] = 0.5
    assert fastsim.cosent_matrix(x, y, targets, levels=given, **options).isnan()


@pytest.mark.parametrize("levels", [[0.0, 0.0, 1.0], [1.0, 0.0], [0.0, torch.nan], [torch.nan]])
def test_levels_that_do_not_ascend(levels, monkeypatch):
    """Where they are not read they make the loss NaN, whatever the targets."""
    levels, x, targets = torch.tensor(levels), torch.randn(4, 6), torch.eye(4)
    module = sys.modules[fastsim.cosent_matrix.__module__]
    with pytest.raises(ValueError, match="levels: wanted distinct values in ascending order"):
        fastsim.cosent_matrix(x, x.clone(), targets, levels=levels)
    monkeypatch.setattr(module, "can_be_read", lambda tensor: False)
    assert fastsim.cosent_matrix(x, x.clone(), targets, levels=levels).isnan()


@pytest.mark.parametrize("loss", [losses.batch_semi_hard_triplet, losses.batch_all_triplet])
def test_a_largest_group_that_is_given(loss):
    x, groups = torch.randn(9, 6), torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
    wanted = loss(x, groups)
    assert torch.equal(loss(x, groups, largest_group=3), wanted)
    torch.testing.assert_close(loss(x, groups, largest_group=5), wanted)
    assert loss(x, groups, largest_group=2).isnan()
