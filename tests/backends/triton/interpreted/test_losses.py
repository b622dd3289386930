"""Every loss of the Triton backend against loops in float64: value and all gradients.

The tolerance is twice the error of the dense torch formula (`_from_scores` of the loss) on unit
rows rounded to the operands' precision, plus one rounding: of the largest entry of a gradient of
rows; of what the scores of a row, each rounded, may move its loss; of all terms of a gradient that
is one sum over the scores.
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
from fastsim.tile import Tile
from tests.backends.triton.interpreted import oracle

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {"aligned": (16, 32, 64), "ragged": (21, 45, 40), "narrow": (5, 33, 3)}


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


def nce(rows, columns, *, symmetric, exclude=False, margin=0.0, shared=False, above=None):
    pick = torch.randint(0, columns, (rows,)) if shared else torch.randperm(columns)[:rows]
    options = {"symmetric": symmetric, "margin": margin}
    if exclude:
        options["exclude"] = duplicates(rows, columns)

    def truth(s, temperature):
        limit = {} if above is None else {"above": above}
        return oracle.info_nce(s, pick.tolist(), temperature, **options, **limit)

    asked = options | {"exclude_above": above}
    return Case(losses.info_nce, truth, (pick,), asked, {"temperature": 0.1})


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

    kinds = {"groups": ids, "soft": soft, "integers": integers}
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


def rounded_units(x, dtype):
    """Unit rows as the kernels hold them; the gradient passes the rounding."""
    unit = torch.nn.functional.normalize(x.float(), eps=torch.finfo(torch.float32).tiny)
    return unit + (unit.to(dtype).float() - unit).detach()


def results(case, x, y, reduction):
    """(Triton, dense formula, truth), each the losses and every gradient, and their roundings."""
    half = x.dtype.itemsize == 2
    operand = torch.float16 if half else torch.float32
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
            scores = rounded_units(left, operand) @ rounded_units(right, operand).T
            spec = SPECIFICATIONS[case.loss]
            out = spec(scores, *case.arguments, **numbers, **options, **case.spec_options)
        else:
            cosines = oracle.cosines(left, right)
            cosines.retain_grad()
            out = case.truth(cosines, **numbers)
            out = {"mean": out.mean, "none": lambda: out}.get(reduction, lambda: out)()  # noqa: B023
        wanted = [left, *([] if case.alone else [right]), *numbers.values()]
        found.append(gradients(out, wanted))
    # z = s / temperature or scale s + bias: sums of score gradients times these.
    cosines, score_grads = cosines.detach(), cosines.grad.abs()
    per = {
        name: (score_grads * cosines.abs()).sum() / value for name, value in case.numbers.items()
    }
    if "bias" in per:
        per["bias"] = score_grads.sum() / case.numbers["scale"]
    sizes = [t.abs().max() for t in found[-1]]
    moved = (score_grads * cosines.abs()).sum(1)
    sizes[0] = sizes[0] + (moved.max() if reduction == "none" else moved.sum())
    if per:
        sizes[-len(per) :] = per.values()
    # A logit of float32 rounds with its size, and its score gradient, an exponential, by as much.
    numbers = case.numbers
    largest = numbers.get("scale", 1.0) / numbers.get("temperature", 1.0) + abs(
        numbers.get("bias", 0.0)
    )
    eps = torch.finfo(operand).eps + torch.finfo(torch.float32).eps * largest
    return found, [float(eps * size) for size in sizes]


def check(found, roundings):
    names = ("loss", "gradient 0", "gradient 1", "gradient 2", "gradient 3")
    for name, mine, dense, truth, rounding in zip(names, *found, roundings, strict=False):
        assert mine.shape == truth.shape
        error, formula = ((t.double() - truth).abs().max() for t in (mine, dense))
        bound = 2 * (formula + rounding)
        assert error <= bound, f"{name}: error {error:.2e}, tolerance {bound:.2e}"


def clear_of_ties(x, y):
    """Rows whose negatives differ, among them and from the positive, by more than rounding."""
    s = oracle.cosines(x.double(), y.double())
    rest = s - torch.where(torch.eye(*s.shape) > 0, 9.0, 0.0)
    gap = (rest.sort(descending=True).values.diff().abs()).amin()
    return min(gap, (rest - s.diagonal()[:, None]).abs().amin()) > 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_loss(name, shape, dtype):
    rows, columns, depth = SHAPES[shape]
    if dtype != torch.float32 and shape != "ragged":
        pytest.skip("16-bit operands take the ragged shape alone")
    if name.startswith(("full_triplet", "info_nce above")) and dtype != torch.float32:
        pytest.skip("which negative is chosen is a matter of rounding: test_selection")
    for _ in range(20):
        x, y = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        if not name.startswith("full_triplet") or clear_of_ties(x, y):
            break
    case = CASES[name](rows, columns)
    reductions = case.reductions if shape == "ragged" else case.reductions[:1]
    for reduction in reductions:
        check(*results(case, x, y, reduction))


@pytest.mark.parametrize("first", [0, 5, 33])
def test_rows_and_columns_that_are_parts(first):
    """The diagonal of a part of the rows, or against a part of the columns, lies elsewhere."""
    x, groups = torch.randn(40, 24), torch.randint(0, 9, (40,))
    whole = losses.sup_con(x, groups, reduction="none", backend="eager")
    rows = slice(first, first + 7)
    parts = Pairs(None, None, None, groups[rows], groups, None, 0.0, "diagonal", first)
    tile = Tile("softmax", parts, normalise=True)
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
        top, total = backend.forward(Tile("levels", part, number, levels=levels), *operands)
        sums.append(total * (number * top).exp())
    top, total = backend.forward(Tile("levels", pairs, number, levels=levels), unit, unit)
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
    tile = Tile("multi_positive", pairs, torch.tensor(20.0))
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
