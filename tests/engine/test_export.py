"""Graphs for batches of any size: torch.compile, torch.export and AOTInductor of an encoder; what a
dispatch mode is shown."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import fastsim
from tests.cases import BY_NAME, inputs

WIDTH = 4
# One case of every loss; those with a target matrix of few values find these while they run.
CASES = tuple({case.loss: case for case in BY_NAME.values() if "soft" not in case.name}.values())
# Of each way to a gradient one: the engine, its rows alone, lists of scores, chosen rows, bands.
COMPILED = tuple(
    case
    for case in CASES
    if case.loss.__name__
    in ("info_nce", "full_triplet", "cosent", "batch_hard_triplet", "batch_all_triplet", "sup_con")
)
PER_CALL = (tuple, torch.Tensor)  # options of one batch
NUMBERS = ("temperature", "scale", "margin", "gamma", "beta")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Encoded(torch.nn.Module):
    """A loss of what a layer makes of its inputs; numbers may be given with every call."""

    def __init__(self, case, options):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.case, self.options = case, options

    def forward(self, tensors, others, numbers):
        encoded = [self.layer(t) if t is not None and t.dim() == 2 else t for t in tensors]
        if encoded[0].dim() == 1:
            encoded[0] = encoded[0] * sum(p.sum() for p in self.layer.parameters())
        return self.case.loss(*encoded, *others, **self.options, **numbers)


def given(case, rows, columns, seed):
    """(tensors, other arguments, options) of the case in float32."""
    return inputs(case, (rows, columns, WIDTH), torch.float32, seed)


def numbers_of(case, options, value):
    """An option of the loss that is a number, which changes from call to call."""
    names = [n for n in NUMBERS if n in case.loss.__kwdefaults__ and n not in options]
    return {names[0]: value} if names else {}


def any_rows(value):
    """The sizes that may change: every one but the width."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(any_rows, value))
    if isinstance(value, dict):
        return dict.fromkeys(value)
    if value is None:
        return None
    auto = torch.export.Dim.AUTO
    return {place: auto for place, size in enumerate(value.shape) if size != WIDTH}


@pytest.mark.parametrize("case", COMPILED, ids=repr)
def test_compiled_for_any_rows_and_numbers(case, usable):
    """One batch after the other, of other sizes, while a number is annealed."""
    usable("cpu")
    tensors, others, options = given(case, 5, 7, seed=41)
    model = Encoded(case, {k: v for k, v in options.items() if not isinstance(v, PER_CALL)})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, (rows, columns) in enumerate([(5, 7), (6, 9), (11, 13)]):
        tensors, others, _ = given(case, rows, columns, seed=41 + step)
        numbers = numbers_of(case, model.options, 0.3 + 0.1 * step)
        grads = []
        for function in (compiled, model):
            value = function(tensors, others, numbers)
            model.zero_grad()
            value.backward()
            grads.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_exported_for_any_rows(case, usable):
    usable("cpu")
    tensors, others, options = given(case, 5, 7, seed=42)
    model = Encoded(case, {k: v for k, v in options.items() if not isinstance(v, PER_CALL)})
    first = (tensors, others, {})
    with torch.no_grad():
        exported = torch.export.export(model, first, dynamic_shapes=any_rows(first)).module()
        for rows, columns in ((6, 9), (11, 13)):
            tensors, others, _ = given(case, rows, columns, seed=43)
            value = model(tensors, others, {})
            # A small batch without a graph is one call of the backend, which sums in another order.
            torch.testing.assert_close(exported(tensors, others, {}), value)


class Search(torch.nn.Module):
    """The best of a corpus, and how well the queries tell their own from it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, queries, corpus):
        queries, corpus = self.layer(queries), self.layer(corpus)
        loss = fastsim.info_nce(queries, corpus)
        return *fastsim.top_k(queries, corpus, 3), fastsim.cosine_similarity(queries, corpus), loss


def searches(run):
    """The results of `run` against the model itself, for other sizes than it was made with."""
    model = Search()
    made = torch.randn(5, WIDTH), torch.randn(9, WIDTH)
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        exported = torch.export.export(model, made, dynamic_shapes=({0: auto}, {0: auto}))
        function = run(exported)
        for rows, columns in ((5, 9), (7, 12)):
            sides = torch.randn(rows, WIDTH), torch.randn(columns, WIDTH)
            for got, wanted in zip(function(*sides), model(*sides), strict=True):
                torch.testing.assert_close(got, wanted)


def test_search_is_exported(usable):
    usable("cpu")
    searches(lambda exported: exported.module())


def test_search_by_aot_inductor(usable, tmp_path):
    usable("cpu")

    def packaged(exported):
        path = str(tmp_path / "search.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
        return torch._inductor.aoti_load_package(path)

    searches(packaged)


class Shown(TorchDispatchMode):
    """Notes the names of our operators that it is shown."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace.startswith("fastsim"):
            self.names.append(f"{function.namespace}::{function.__name__}")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("backend", [name for name in fastsim.backends() if name != "eager"])
@pytest.mark.parametrize("rows", [6, 1200])
def test_a_dispatch_mode_is_shown_whole_operators(rows, backend, usable):
    """Not what is in them, which reads numbers that a fake tensor does not have."""
    usable(backend)

    def gradient_of_losses():
        x, y = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(rows, WIDTH)
        fastsim.info_nce(x, y, reduction="none", backend=backend).sum().backward()
        return x.grad

    with Shown() as shown:
        gradient_of_losses()
    assert shown.names == ["fastsim::tile.default", "fastsim::tile_backward.default"]
    with FakeTensorMode():
        assert gradient_of_losses().shape == (rows, WIDTH)


# The number of distinct targets in a matrix, which is a size, is not known without their values.
UNSIZED = ("cosent_matrix-dot", "cosent_matrix-soft")
SIZED = [case for name, case in BY_NAME.items() if name not in UNSIZED]


@pytest.mark.parametrize("case", SIZED, ids=repr)
def test_a_loss_of_fake_tensors_has_shapes_and_no_values(case):
    """As those who plan the memory of a model call it; no check reads what is not there."""
    tensors, others, options = given(case, 7, 11, 23)
    shape = case.loss(*tensors, *others, **options).shape
    with FakeTensorMode() as mode:

        def fake(value):
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        made = [t if t is None else fake(t).requires_grad_() for t in tensors]
        others, options = tree_map(fake, others), tree_map(fake, options)
        found = case.loss(*made, *others, **options)
        made = [t for t in made if t is not None]
        grads = torch.autograd.grad(found.sum(), made)
    assert isinstance(found, FakeTensor)
    assert found.shape == shape
    assert [grad.shape for grad in grads] == [t.shape for t in made]
