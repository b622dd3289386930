"""Every loss of the Triton backend against loops in float64: value and all gradients.

Each loss has one configuration a run, drawn afresh: inputs of 16 or 32 bits, sizes that divide no
tile, rows that are strided, transposed or zero, targets beyond [-1, 1].

The tolerance is twice the error of the dense torch formula (`_from_scores` of the loss) on unit
rows of float32, plus one rounding: of a loss, what the scores of a row, each rounded to float32,
may move it; of a gradient of rows, the terms of its entries in the type of the score gradients,
which is float16 for inputs of 16 bits, and the least of its numbers; of a gradient that is one sum
over the scores, its terms.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch

from fastsim import losses
from fastsim.backends import get
from fastsim.engine.autograd import tile_loss
from fastsim.engine.selection import hardest_columns
from fastsim.losses import SPECIFICATIONS
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.backends.triton.interpreted import oracle
from tests.seeds import seed_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 3, 17, 100, 127, 129)
TILES = 12  # of 16 x 32 scores, at most: what the interpreter does in a second or two
LEAST_HALF, HALF_RANGE = 2.0**-24, 2.0**14  # the least float16, and what its large ones reach
CHOOSING = ("full_triplet", "info_nce above")
LAYOUTS = ("rows", "strided", "transposed", "zero row")


@dataclass
class Case:
    """A call loss(x, y, *arguments, **options), the same on scores, and the oracle's."""

    loss: object
    truth: object
    arguments: tuple = ()
    options: dict = field(default_factory=dict)
    numbers: dict = field(default_factory=dict)
    alone: bool = False  # x with itself
    spec_options: dict = field(default_factory=dict)
    reductions: tuple = ("mean", "none")


def diagonal(rows, columns):
    return 2 * torch.eye(rows, columns) - 1


def grouped(row_groups, column_groups):
    return torch.where(row_groups[:, None] == column_groups, 1.0, -1.0)


def duplicates(rows, columns):
    """Ids with a few equals, the column of a row's own positive among them."""
    return torch.randint(0, rows, (rows,)), torch.randint(0, rows, (columns,))


def nce(
    rows, columns, *, symmetric, exclude=False, margin=0.0, shared=False, above=None, own=False
):
    """own: the positives are those of no argument, each row's own column."""
    pick = torch.randint(0, columns, (rows,)) if shared else torch.randperm(columns)[:rows]
    pick = torch.arange(rows) if own else pick
    options = {"symmetric": symmetric, "margin": margin}
    if exclude:
        options["exclude"] = duplicates(rows, columns)

    def truth(s, temperature):
        limit = {} if above is None else {"above": above}
        return oracle.info_nce(s, pick.tolist(), temperature, **options, **limit)

    asked = options | {"exclude_above": above}
    given = () if own else (pick,)
    return Case(losses.info_nce, truth, given, asked, {"temperature": 0.1})


def decoupled(rows, columns):
    pick = torch.randint(0, columns, (rows,))

    def truth(s, temperature):
        return oracle.decoupled_contrastive(s, pick.tolist(), temperature)

    return Case(losses.decoupled_contrastive, truth, (pick,), {}, {"temperature": 0.1})


def con(rows, columns):
    groups = torch.randint(0, max(2, rows // 3), (rows,))

    def truth(s, temperature):
        return oracle.sup_con(s, groups.tolist(), temperature)

    numbers = {"temperature": 0.1}
    return Case(losses.sup_con, truth, (groups,), {}, numbers, alone=True, reductions=("none",))


def contrast(rows, columns, *, loss, truth, numbers=None, **options):
    groups = torch.randint(0, max(2, rows // 3), (rows,))
    groups[0] = -1  # alone

    def on_scores(s, **learnt):
        return truth(s, groups.tolist(), **options, **learnt)

    return Case(
        loss, on_scores, (groups,), options, numbers or {}, alone=True, reductions=("none",)
    )


def against(loss, truth, targets, matrix, numbers, **rest):
    return Case(
        loss, lambda s, **n: truth(s, matrix.double(), **n), (targets,), {}, numbers, **rest
    )


def triplet(rows, columns, *, mining, exclude=False):
    options = {"mining": mining, "margin": 0.25}
    if exclude:
        options["exclude"] = duplicates(rows, columns)
    return Case(losses.full_triplet, lambda s: oracle.full_triplet(s, **options), (), options)


def ranked(rows, columns, targets, matrix):
    def truth(s, scale):
        return oracle.cosent(s.flatten(), matrix.flatten(), scale)

    return Case(losses.cosent_matrix, truth, (targets,), {}, {"scale": 20.0}, reductions=(None,))


def ranked_alone(rows, columns):
    groups = torch.randint(0, 4, (rows,))
    above = torch.triu_indices(rows, rows, 1).unbind()

    def truth(s, scale):
        return oracle.cosent(s[above], grouped(groups, groups)[above], scale)

    return Case(
        losses.cosent_matrix,
        truth,
        ((groups, groups),),
        {},
        {"scale": 20.0},
        alone=True,
        spec_options={"each_pair_once": True},
        reductions=(None,),
    )


def integers(rows, columns):
    return torch.randint(-1, 2, (rows, columns), dtype=torch.int8)


def soft(rows, columns):
    # A step of two columns: the kernels read targets by their strides.
    return (2 * torch.rand(rows, 2 * columns) - 1).bfloat16()[:, ::2]


def far(rows, columns):
    return 8 * torch.randn(columns, rows).T


def ids(rows, columns):
    return torch.randint(0, 5, (rows,)), torch.randint(0, 5, (columns,))


def target_cases(loss, truth, numbers):
    def made(kind):
        def case(rows, columns):
            targets = kind(rows, columns)
            matrix = grouped(*targets) if isinstance(targets, tuple) else targets.double()
            return against(loss, truth, targets, matrix, numbers)

        return case

    def none(rows, columns):
        return against(loss, truth, None, diagonal(rows, columns), numbers)

    kinds = {"groups": ids, "soft": soft, "integers": integers, "far": far}
    return {"diagonal": none, **{name: made(kind) for name, kind in kinds.items()}}


SIGLIP = {"scale": 10.0, "bias": -5.0}
CASES = {
    "info_nce": lambda n, m: nce(n, m, symmetric=False),
    "info_nce exclude": lambda n, m: nce(n, m, symmetric=False, exclude=True, margin=0.1),
    "info_nce symmetric": lambda n, m: nce(n, m, symmetric=True),
    "info_nce symmetric exclude": lambda n, m: nce(
        n, m, symmetric=True, exclude=True, margin=0.2, shared=True
    ),
    "info_nce above": lambda n, m: nce(n, m, symmetric=True, exclude=True, above=0.15),
    "decoupled_contrastive": decoupled,
    "sup_con": con,
    "nt_xent": lambda n, m: contrast(
        n, m, loss=losses.nt_xent, truth=oracle.nt_xent, numbers={"temperature": 0.1}
    ),
    "multi_similarity": lambda n, m: contrast(
        n,
        m,
        loss=losses.multi_similarity,
        truth=oracle.multi_similarity,
        alpha=2.0,
        beta=50.0,
        base=0.5,
    ),
    "full_triplet hard": lambda n, m: triplet(n, m, mining="hard"),
    "full_triplet semi-hard": lambda n, m: triplet(n, m, mining="semi-hard", exclude=True),
    "cosent_matrix integers": lambda n, m: ranked(n, m, t := integers(n, m), t),
    "cosent_matrix alone": ranked_alone,
}
for _loss, _truth, _numbers in (
    (losses.siglip, oracle.siglip, SIGLIP),
    (losses.matrix_cross_entropy, oracle.matrix_cross_entropy, {"temperature": 0.5}),
    (losses.matrix_mse, oracle.matrix_mse, {}),
):
    for _kind, _made in target_cases(_loss, _truth, _numbers).items():
        CASES[f"{_loss.__name__} {_kind}"] = _made


def gradients(outputs, wanted):
    """The output and its gradients for weights of every row that differ."""
    outputs = outputs.flatten()
    weights = torch.linspace(0.5, 1.5, len(outputs), dtype=outputs.dtype)
    (outputs * weights).sum().backward()
    return [outputs.detach(), *(tensor.grad for tensor in wanted)]


def units(x):
    """Unit rows in float32; a zero row stays zero, and has gradient zero."""
    x = x.float()
    norms = x.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, x / torch.where(norms > 0, norms, 1.0), 0.0)


def terms(score_grads, x, y):
    """What the entries of dL/dx are summed of, in absolute values; 0 for zero rows."""
    x, y = x.detach(), y.detach()
    norms = x.norm(dim=1, keepdim=True)
    units = y / y.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return torch.where(norms > 0, score_grads @ units.abs() / norms.clamp(min=1e-300), 0.0)


def results(case, x, y, reduction):
    """(Triton, dense formula, truth), each the losses and every gradient, and their roundings."""
    panel = torch.float16 if x.dtype.itemsize == 2 else torch.float32
    options = case.options | ({} if reduction is None else {"reduction": reduction})
    found = []
    for kind in ("triton", "dense", "truth"):
        dtype = torch.float64 if kind == "truth" else x.dtype
        left, right = (t.detach().to(dtype).requires_grad_() for t in (x, y))
        right = left if case.alone else right
        wide = torch.float64 if kind == "truth" else torch.float32
        numbers = {
            name: torch.tensor(value, dtype=wide, requires_grad=True)
            for name, value in case.numbers.items()
        }
        if kind == "triton":
            operands = (left, None) if case.loss is losses.cosent_matrix and case.alone else None
            operands = operands or ((left,) if case.alone else (left, right))
            out = case.loss(*operands, *case.arguments, **numbers, **options, backend="triton")
        elif kind == "dense":
            scores = units(left) @ units(right).T
            spec = SPECIFICATIONS[case.loss]
            out = spec(scores, *case.arguments, **numbers, **options, **case.spec_options)
        else:
            cosines = oracle.cosines(left, right)
            cosines.retain_grad()
            out = case.truth(cosines, **numbers)
            reduced = {"mean": torch.Tensor.mean, "sum": torch.Tensor.sum}
            out = reduced[reduction](out) if reduction in reduced else out
        wanted = [left, *([] if case.alone else [right]), *numbers.values()]
        found.append(gradients(out, wanted))
    cosines, score_grads = cosines.detach(), cosines.grad.abs()
    sizes = [found[-1][0].abs().max(), *gradient_sizes(case, score_grads, cosines, left, right)]
    moved = (score_grads * cosines.abs()).sum(1)
    if case.loss is losses.matrix_cross_entropy and isinstance(case.arguments[0], torch.Tensor):
        # A difference of a log-sum-exp and logits, which of one candidate are equal.
        moved = moved + (case.arguments[0].double().abs() * cosines.abs()).sum(1)
    sizes[0] = sizes[0] + (moved.max() if reduction == "none" else moved.sum())
    # A logit of float32 rounds with its size, and its score gradient, an exponential, by as much.
    numbers = case.numbers
    steep = numbers.get("scale", 1.0) / numbers.get("temperature", 1.0)
    single = torch.finfo(torch.float32).eps * (1 + steep + abs(numbers.get("bias", 0.0)))
    spacings = [single, *(torch.finfo(panel).eps + single,) * (len(sizes) - 1)]
    roundings = [float(eps * size) for eps, size in zip(spacings, sizes, strict=True)]
    if panel == torch.float16:
        # The largest that a score gradient can be lies in the upper half of the panel's range.
        least = torch.full_like(score_grads, steep * LEAST_HALF / HALF_RANGE)
        steps = gradient_sizes(case, least, cosines, left, right)
        roundings[1:] = [r + float(step) for r, step in zip(roundings[1:], steps, strict=True)]
    return found, roundings


def gradient_sizes(case, score_grads, cosines, left, right):
    """Of what the largest entry of each gradient is summed, for score gradients of that size."""
    of_rows, of_columns = terms(score_grads, left, right), terms(score_grads.T, right, left)
    yield (of_rows + of_columns if case.alone else of_rows).max()
    if not case.alone:
        yield of_columns.max()
    # z = s / temperature or scale s + bias: sums of score gradients times these.
    for name, value in case.numbers.items():
        if name == "bias":
            yield score_grads.sum() / case.numbers["scale"]
        else:
            yield (score_grads * cosines.abs()).sum() / value


def check(found, roundings):
    names = ("loss", "gradient 0", "gradient 1", "gradient 2", "gradient 3")
    for name, mine, dense, truth, rounding in zip(names, *found, roundings, strict=False):
        assert mine.shape == truth.shape
        error, formula = ((t.double() - truth).abs().max() for t in (mine, dense))
        bound = 2 * (formula + rounding)
        assert bound < float("inf"), f"{name}: the dense formula is not finite"
        assert error <= bound, f"{name}: error {error:.2e}, tolerance {bound:.2e}"


def clear_of_ties(x, y):
    """Rows whose negatives differ, among them and from the positive, by more than rounding."""
    s = oracle.cosines(x.double(), y.double())
    rest = s - torch.where(torch.eye(*s.shape) > 0, 9.0, 0.0)
    gap = (rest.sort(descending=True).values.diff().abs()).amin()
    return min(gap, (rest - s.diagonal()[:, None]).abs().amin()) > 1e-5


def drawn(choices):
    return choices[torch.randint(len(choices), ()).item()]


def shape_of(name):
    """(rows, columns, depth): no more rows than columns, and two of what needs others.

    Where a score is chosen, enough of depth for all scores to differ.
    """
    while True:
        rows, columns, depth = (drawn(SIZES) for _ in range(3))
        alone = name.startswith(("sup_con", "nt_xent", "multi", "cosent_matrix alone"))
        columns = rows if alone else columns
        few = -(-rows // 16) * -(-columns // 32) <= TILES
        chooses = name.startswith(CHOOSING)
        deep = depth > 3 or not chooses
        if few and deep and rows <= columns and columns > (alone or chooses):
            return rows, columns, depth


def rows_of(count, depth, layout, dtype):
    if layout == "strided":
        return torch.randn(count, 2 * depth).to(dtype)[:, ::2]
    x = torch.randn(depth, count).to(dtype).T if layout == "transposed" else None
    x = torch.randn(count, depth).to(dtype) if x is None else x
    if layout == "zero row":
        x[torch.randint(count, ())] = 0
    return x


@pytest.mark.parametrize("name", CASES)
def test_loss(name, in_panels):
    compare(name, CASES[name])


def compare(name, made, dtypes=DTYPES, reductions=None):
    """Draws inputs and compares what is made(rows, columns) on them."""
    torch.manual_seed(seed_of(sum(map(ord, name))))
    rows, columns, depth = shape_of(name)
    # Which negative is chosen is a matter of rounding and of ties: test_lists.
    chooses = name.startswith(CHOOSING)
    dtype = torch.float32 if chooses else drawn(dtypes)
    layouts = [drawn(LAYOUTS[: 3 if chooses else 4]) for _ in "xy"]
    print(rows, columns, depth, dtype, layouts)  # shown for a test that fails
    for _ in range(20):
        x, y = (
            rows_of(count, depth, layout, dtype)
            for count, layout in zip((rows, columns), layouts, strict=True)
        )
        if not chooses or clear_of_ties(x, y):
            break
    case = made(rows, columns)
    check(*results(case, x, y, drawn(reductions or case.reductions)))


@pytest.mark.parametrize("first", [0, 5, 33])
def test_rows_and_columns_that_are_parts(first):
    """The diagonal of a part of the rows, or against a part of the columns, lies elsewhere."""
    x, groups = torch.randn(40, 24), torch.randint(0, 9, (40,))
    whole = losses.sup_con(x, groups, reduction="none", backend="eager")
    rows = slice(first, first + 7)
    parts = Pairs(None, None, None, groups[rows], groups, None, 0.0, "diagonal", first)
    tile = TileLoss("softmax", parts, normalise=True)
    got = tile_loss(tile, x[rows], x, scale=10.0, formula=None, backend=get("triton"))
    torch.testing.assert_close(got, whole[rows])
    # Each pair once: the levels of all parts of rows and columns are those of everything.
    pairs = Pairs(row_groups=groups, column_groups=groups, skip="lower")
    levels, number = torch.tensor([-1.0, 1.0]), torch.tensor(20.0)
    backend, sums = get("triton"), []
    unit = backend.unit_rows(x)[0]
    for r, c in (
        (r, c) for r in (slice(0, 9), slice(9, 40)) for c in (slice(0, 30), slice(30, 40))
    ):
        part = replace(pairs, row_groups=groups[r], offset=r.start).of_columns(c)
        operands = (backend.unit_rows(x[s])[0] for s in (r, c))
        top, total = backend.forward(TileLoss("levels", part, number, levels=levels), *operands)
        sums.append(total * (number * top).exp())
    top, total = backend.forward(TileLoss("levels", pairs, number, levels=levels), unit, unit)
    torch.testing.assert_close(sum(sums), total * (number * top).exp(), rtol=1e-5, atol=0)
    # The hardest of a part of the rows.
    hardest = losses.hardest_pairs(x, groups, distance="cosine", backend="eager")
    found = hardest_columns(unit[rows], unit, None, x.dtype, parts, backend)
    for mine, wanted in zip(found, hardest[2:], strict=True):
        assert torch.equal(mine, wanted[rows])


def test_terms_against_the_sums_of_more_columns():
    """The positives' terms of parts of the columns, the negatives' sums over all being known."""
    x, groups = torch.randn(40, 24), torch.randint(0, 9, (40,))
    whole = losses.nt_xent(x, groups, temperature=1 / 20, reduction="none", backend="eager")
    backend = get("triton")
    unit = backend.unit_rows(x)[0]
    pairs = Pairs(row_groups=groups, column_groups=groups, negative_target=0.0, skip="diagonal")
    tile = TileLoss("multi_positive", pairs, torch.tensor(20.0))
    *sums, _, score_grads = backend.forward(tile, unit, unit)
    terms = []
    for columns in (slice(0, 30), slice(30, 40)):
        part = replace(tile, pairs=pairs.of_columns(columns))
        own = backend.unit_rows(x[columns])[0]
        state = backend.forward(part, unit, own, sums=sums)
        assert all(torch.equal(mine, known) for mine, known in zip(state, sums, strict=False))
        terms.append(torch.stack(state[2:]))
    losses_of, score_grads_of = sum(terms).float()
    torch.testing.assert_close(losses_of, whole)
    torch.testing.assert_close(score_grads_of, score_grads.float())
