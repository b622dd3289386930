"""Derivatives beyond the first, and those of torch.func and forward-mode AD, of every function.

Each is that of the float64 oracle, or refused in a sentence of ours; never zero, never an error of
torch's own machinery.
"""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp
from torch.utils._pytree import tree_flatten, tree_unflatten

import fastsim
from tests import oracles
from tests.case_inputs import embeddings
from tests.cases import CASES, Case, inputs, on_backend

# torch's own forward-mode formulas are made with it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

BACKENDS = tuple(fastsim.backends())
SHAPE = (4, 6, 4)


def scores(name, loss, oracle, *, paired=False):
    """A public function of two sides that is no loss."""

    def make(n, m, d, generator):
        sides = [embeddings(n, d, generator=generator)]
        return [*sides, embeddings(n if paired else m, d, generator=generator)], [], {}

    return Case(name, loss, oracle, make, reduces=False)


def mean_negative(x, y):
    s = oracles.cosines(x, y)
    return (s.sum(1) - s.diagonal()) / (len(y) - 1)


def closest_negative(x, y):
    s = oracles.cosines(x, y)
    return s.masked_fill(torch.eye(*s.shape, dtype=torch.bool), -2).amax(1)


def angle_similarity(u, v):
    a, b = u.chunk(2, 1)
    pairs = oracles.cosines(torch.cat([a + b, b - a], 1), v)
    return 2**0.5 * pairs.diagonal().abs()


def farthest(x, groups):
    d = oracles.distances(x, "euclidean")
    return torch.stack([(row * (groups == own)).max() for row, own in zip(d, groups, strict=True)])


def pairs_of_groups(n, m, d, generator):
    return [embeddings(n, d, generator=generator)], [torch.arange(n) % 2], {}


CLASSIFIER = fastsim.losses.SoftmaxClassification(4, 3)
FUNCTIONS = (
    *CASES,
    scores("cosine_similarity", fastsim.cosine_similarity, oracles.cosines),
    scores(
        "paired_cosine_similarity",
        fastsim.paired_cosine_similarity,
        lambda x, y: oracles.cosines(x, y).diagonal(),
        paired=True,
    ),
    scores("mean_negative", fastsim.mean_negative, mean_negative),
    scores(
        "closest_negative",
        lambda *sides, **options: fastsim.closest_negative(*sides, mining="hard", **options)[0],
        closest_negative,
    ),
    scores("angle_similarity", fastsim.angle_similarity, angle_similarity, paired=True),
    Case(
        "hardest_pairs",
        lambda *given, **options: fastsim.hardest_pairs(*given, **options).positive,
        farthest,
        pairs_of_groups,
        reduces=False,
    ),
    Case(
        "softmax_classification",
        lambda u, v, labels, weight: torch.func.functional_call(
            CLASSIFIER, {"classifier.weight": weight}, (u, v, labels)
        ),
        lambda u, v, labels, weight: torch.nn.functional.cross_entropy(
            torch.cat([u, v, (u - v).abs()], 1) @ weight.T, labels
        ),
        lambda n, m, d, generator: (
            [embeddings(n, d, generator=generator) for _ in range(2)],
            [torch.arange(n) % 3, embeddings(3, 3 * d, generator=generator)],
            {},
        ),
        reduces=False,
    ),
)
WITHOUT_CHOICE = (fastsim.triplet_margin, FUNCTIONS[-1].loss)


def problem(case, backend=None):
    """(function, oracle, sides): both functions of the sides alone, with one number as value."""
    tensors, others, options = inputs(case, SHAPE, torch.float64, seed=31)
    sides = [t for t in tensors if t is not None]
    chosen = {} if backend is None or case.loss in WITHOUT_CHOICE else {"backend": backend}

    def weighted(function, **extra):
        def value(*sides):
            given = [*sides, *[None] * (len(tensors) - len(sides))]
            found = function(*given, *others, **options, **extra)
            return (found * torch.linspace(0.5, 1.5, found.numel()).reshape(found.shape)).sum()

        return value

    reduction = {"reduction": "none"} if case.reduces else {}
    return weighted(case.loss, **reduction, **chosen), weighted(case.oracle), sides


def penalised(function, sides):
    """The gradient of the value and of the squares of its gradient together."""
    sides = [side.clone().requires_grad_() for side in sides]
    value = function(*sides)
    grads = torch.autograd.grad(value, sides, create_graph=True)
    penalty = value + sum(grad.square().sum() for grad in grads)
    return torch.autograd.grad(penalty, sides, retain_graph=True), sides, penalty


@functools.cache
def second_derivatives(case):
    """Of the oracle: of the penalised value, and the Hessian in the first side."""
    _, oracle, sides = problem(case)
    first, *rest = sides
    return penalised(oracle, sides)[0], hessian(lambda x: oracle(x, *rest), first)


@functools.cache
def jacobian(case):
    """Of the oracle in the first side."""
    _, oracle, (first, *rest) = problem(case)
    return torch.autograd.functional.jacobian(lambda x: oracle(x, *rest), first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_second_derivatives(case, backend, usable):
    usable(backend)
    function, _, sides = problem(case, backend)
    wanted, truth = second_derivatives(case)
    got, leaves, penalty = penalised(function, sides)
    torch.testing.assert_close(got, wanted)
    penalty.backward(inputs=leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), wanted)
    first, *rest = sides
    vector = torch.randn_like(first)
    torch.testing.assert_close(hessian(lambda x: function(x, *rest), first), truth)
    _, product = hvp(lambda x: function(x, *rest), first, vector)
    torch.testing.assert_close(product, torch.tensordot(truth, vector, first.dim()))


@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_forward_mode(case):
    function, oracle, sides = problem(case)
    tangents = [torch.randn_like(side) for side in sides]
    leaves = [side.clone().requires_grad_() for side in sides]
    grads = torch.autograd.grad(oracle(*leaves), leaves)
    wanted = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    _, got = torch.func.jvp(function, tuple(sides), tuple(tangents))
    torch.testing.assert_close(got, wanted)
    with forward_ad.dual_level():
        dual = map(forward_ad.make_dual, sides, tangents)
        torch.testing.assert_close(forward_ad.unpack_dual(function(*dual)).tangent, wanted)
        last = [*sides[:-1], forward_ad.make_dual(sides[-1], tangents[-1])]
        got = forward_ad.unpack_dual(function(*last)).tangent
        torch.testing.assert_close(got, (grads[-1] * tangents[-1]).sum())


@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_torch_func(case):
    function, oracle, (first, *rest) = problem(case)
    truth = jacobian(case)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(function)(first, *rest), truth)
    batch = torch.stack([first, torch.randn_like(first), -first])
    mapped = torch.func.vmap(lambda x: function(x, *rest))(batch)
    torch.testing.assert_close(mapped, torch.stack([oracle(x, *rest) for x in batch]))


@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_gradients_for_many_at_once(case):
    """is_grads_batched runs the backward pass of a recorded graph inside vmap."""
    function, _, (first, *rest) = problem(case)
    x = first.clone().requires_grad_()
    above = torch.tensor([1.0, -2.0], dtype=torch.float64)
    got = torch.autograd.grad(function(x, *rest), x, above, is_grads_batched=True)[0]
    truth = jacobian(case)
    torch.testing.assert_close(got, torch.stack([truth, -2 * truth]))


@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_transforms_of_a_backward_pass(case):
    """vmap and forward-mode AD, of a graph that was recorded outside them."""
    function, _, (first, *rest) = problem(case)
    x = first.clone().requires_grad_()
    value, truth = function(x, *rest), jacobian(case)
    above = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def gradient(above):
        return torch.autograd.grad(value, x, above, retain_graph=True)[0]

    torch.testing.assert_close(torch.func.vmap(gradient)(above), torch.stack([truth, -2 * truth]))
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(gradient(forward_ad.make_dual(*above)))
    torch.testing.assert_close(got.primal, truth)
    torch.testing.assert_close(got.tangent, -2 * truth)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_a_named_backend_refuses_what_it_has_no_kernel_for(case, backend, usable):
    usable(backend)
    if case.loss in WITHOUT_CHOICE:
        pytest.skip("no choice of backends")
    function, _, sides = problem(case, backend)
    for transform in (
        lambda: torch.func.jvp(function, tuple(sides), tuple(map(torch.ones_like, sides))),
        lambda: torch.func.grad(function)(*sides),
        lambda: torch.func.vmap(lambda x: function(x, *sides[1:]))(sides[0][None]),
    ):
        with pytest.raises(RuntimeError, match=f"'{backend}' cannot be used: .*torch.func.*eager"):
            transform()


@pytest.mark.parametrize("name", ["temperature", "scale", "bias", "margin"])
def test_a_tangent_of_a_number(name):
    """The number alone is transformed, not the embeddings."""
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    loss = {
        "temperature": fastsim.info_nce,
        "scale": fastsim.siglip,
        "bias": fastsim.siglip,
        "margin": fastsim.full_triplet,
    }[name]
    value = torch.tensor(0.3, dtype=torch.float64)
    leaf = value.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x, y, **{name: leaf}), leaf)
    _, got = torch.func.jvp(lambda v: loss(x, y, **{name: v}), (value,), (torch.ones_like(value),))
    torch.testing.assert_close(got, wanted)
    assert wanted != 0


def test_a_tangent_of_a_temperature_of_scores_of_tokens():
    queries, documents = torch.randn(2, 3, 4), torch.randn(5, 2, 4)
    value = torch.tensor(0.3)

    def loss(temperature):
        return fastsim.late_interaction_distillation(
            queries, documents, torch.eye(2, 5), temperature=temperature
        )

    leaf = value.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(value), wanted)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # of a batched tensor
def test_vmap_over_what_is_no_embedding(case):
    """Targets, groups, ids, guides, masks: each alone is transformed."""
    if case.loss is fastsim.cosent_matrix and not isinstance(
        inputs(case, SHAPE, torch.float64, seed=35)[1][0], tuple
    ):
        pytest.skip("how many distinct targets there are decides a shape")
    tensors, others, options = inputs(case, SHAPE, torch.float64, seed=35)
    wanted = case.loss(*tensors, *others, **options)
    leaves, shape = tree_flatten((others, options))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):

            def function(leaf, place=place):
                given = [*leaves[:place], leaf, *leaves[place + 1 :]]
                others, options = tree_unflatten(given, shape)
                return case.loss(*tensors, *others, **options)

            found = torch.func.vmap(function)(torch.stack([leaf, leaf]))
            torch.testing.assert_close(found, torch.stack([wanted, wanted]))


@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_a_constant_of_torch_func(case):
    """None of its tensors is transformed, but some want a gradient outside."""
    function, oracle, sides = problem(case)
    sides = [side.requires_grad_() for side in sides]
    found = torch.func.grad(lambda factor: factor * function(*sides))(torch.tensor(2.0))
    torch.testing.assert_close(found, oracle(*sides).to(found.dtype))


LAYOUTS = {
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.as_nested_tensor([t, t]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FUNCTIONS, ids=repr)
def test_other_layouts_are_refused(case, layout):
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=32)
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            given = [*tensors[:place], LAYOUTS[layout](tensor), *tensors[place + 1 :]]
            with pytest.raises(TypeError, match=r"^\w+: wanted a dense tensor .* got "):
                case.loss(*given, *others, **options)


@pytest.mark.parametrize("passes", ["in one call", "in passes"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", [c for c in CASES if c.loss is not fastsim.cosent], ids=repr)
def test_changes_in_place_are_refused(case, reduction, passes, request, usable):
    """Between the forward and the backward pass, whatever of it the forward pass has done."""
    usable("cpu")
    if passes == "in passes":
        request.getfixturevalue("in_passes")
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=33)
    options |= on_backend(case, "cpu")
    options |= {"reduction": reduction} if case.reduces else {}
    for place, tensor in enumerate(tensors):
        if tensor is None or (case.loss is fastsim.angle and place == 0):
            continue  # angle reads copies of its first side
        sides = [t if t is None else t.clone().requires_grad_() for t in tensors]
        changed = sides[place] = sides[place] * 1
        value = case.loss(*sides, *others, **options).sum()
        changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_second_derivative_of_a_view_of_the_other_side():
    """Where one side is made of the other, neither is differentiated twice through it."""
    x = torch.randn(4, 5, dtype=torch.float64)

    def value(loss, x):
        return loss(x, 2 * x.roll(1, 0) + x * x)

    def ours(x, y):
        return fastsim.info_nce(x, y, temperature=0.5)

    def truth(x, y):
        return oracles.info_nce(x, y, temperature=0.5).mean()

    got, wanted = (hessian(lambda x, f=f: value(f, x), x) for f in (ours, truth))
    torch.testing.assert_close(got, wanted)


def test_a_value_weighed_by_a_learnt_number():
    """What comes from above has a gradient of its own."""
    case = CASES[0]
    tensors, others, options = inputs(case, SHAPE, torch.float64, seed=34)

    def value(loss, weight):
        x = tensors[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(weight * loss(x), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    got = value(lambda x: case.loss(x, tensors[1], *others, **options), weight)
    wanted = value(lambda x: case.oracle(x, tensors[1], *others, **options).mean(), weight)
    torch.testing.assert_close(got, wanted)
