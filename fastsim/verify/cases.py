"""The losses of each kind, with options and inputs that are hard for kernels."""

import functools
from dataclasses import dataclass, field, replace
from functools import partial

import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.extras import DOT, GUIDE, PARTS, UNTARGETED, extras_of
from fastsim.engine.autograd import tile_loss
from fastsim.engine.log_sum_exp import guide_cosines, log_sum_exp
from fastsim.pairs import Pairs
from fastsim.precision import compute_dtype
from fastsim.tile_loss import TileLoss


@dataclass(frozen=True)
class Problem:
    """A call loss(*leaves, *arguments, **options, backend=...).

    leaves: the tensors with gradients. arguments: the other positional arguments: tensors, tuples
    of tensors, or functions that create a tensor of the size of the scores when it is needed.
    learnt: options that have a gradient too. finite: whether the result is. extras: the names in
    fastsim/backends/extras.py that a backend has to support. exact: the backend whose float64
    result is the truth: "torch" if the dense formula takes too long or lacks the loss.
    """

    name: str
    loss: object
    leaves: list
    arguments: tuple = ()
    options: dict = field(default_factory=dict)
    learnt: dict = field(default_factory=dict)
    finite: bool = True
    extras: tuple = ()
    exact: str = "eager"


def _rows(generator, rows, width, dtype):
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def _ids(generator, rows, columns):
    ids = torch.randint(0, max(2, rows // 2), (rows + columns,), generator=generator)
    return ids[:rows], ids[rows:]


def _targets(rows, columns, seed):
    """Functions that create targets (N, M) of two dtypes, once each."""

    def random_integers(low, high, *shape):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)

    @functools.cache
    def int8():
        return random_integers(-1, 2, rows, columns)

    @functools.cache
    def strided():
        return random_integers(0, 5, columns, rows).to(torch.bfloat16).div_(2).sub_(1).T

    return int8, strided


def problems(kind, shape, dtype, seed=0):
    """The problems of a kind with one shape (rows, columns, width), on the CPU."""
    rows, columns, width = shape
    g = torch.Generator().manual_seed(seed)
    x, y = _rows(g, rows, width, dtype), _rows(g, max(rows, columns), width, dtype)
    groups = torch.randint(0, max(2, rows // 3), (rows,), generator=g)
    int8, strided = _targets(rows, len(y), seed + 1)
    ids = _ids(g, rows, len(y))
    zero, nan, tied = x.clone(), x.clone(), y.clone()
    zero[rows // 2], nan[0, 0] = 0, torch.nan
    tied[rows // 2 :] = tied[: len(y) - rows // 2].clone()
    result = _KINDS[kind](x, y, groups, int8, strided, ids)
    first = result[0]
    for name, rows_ in (("zero row", zero), ("NaN", nan)):
        leaves = [rows_, *first.leaves[1:]]
        result.append(replace(first, name=name, leaves=leaves, finite=name != "NaN"))
    if len(first.leaves) == 2:
        result.append(replace(first, name="ties", leaves=[x, tied], learnt={}))
    return result


def _softmax(x, y, groups, int8, strided, ids):
    learnt = {"temperature": 0.1}
    guide = x.flip(1).contiguous(), y.flip(1).contiguous()
    numbers = torch.arange(len(x))
    return [
        Problem("info_nce", fastsim.info_nce, [x, y], learnt=learnt),
        Problem("symmetric", fastsim.info_nce, [x, y], (), {"symmetric": True}, learnt),
        Problem("ids", fastsim.info_nce, [x, y], (), {"exclude": ids, "margin": 0.1}, learnt),
        _with_extras("above", x, y, learnt, exclude_above=0.1),
        _dot(fastsim.info_nce, [x, y], (), {"temperature": 20.0}),
        _with_extras("bias", x, y, learnt, candidate_bias=y[:, 0].float()),
        _with_extras("guided positives", x, y, learnt, guide=guide),
        Problem("of each row", fastsim.info_nce, [x, y], (), {"reduction": "none"}, learnt),
        Problem("with itself", fastsim.sup_con, [x], (groups,), learnt=learnt),
        Problem("each with itself", fastsim.sup_con, [x], (groups,), {"reduction": "none"}, learnt),
        Problem("one side", _one_side, [x], (numbers, numbers.roll(1)), learnt=learnt),
        Problem("int8", fastsim.matrix_cross_entropy, [x, y], (int8,)),
        Problem("strided", fastsim.matrix_cross_entropy, [x, y], (strided,)),
        Problem("guide", _guided, [x, y], guide, extras=(UNTARGETED, GUIDE)),
        _of_rank("softmax", x, groups, {"scale": 10.0}, normalise=True),
    ]


def _with_extras(name, x, y, learnt, **options):
    extras = extras_of(**options)
    return Problem(name, fastsim.info_nce, [x, y], (), options, learnt, extras=extras)


def _dot(loss, leaves, arguments, learnt, **options):
    """A problem with dot products, whose size is about the square root of the width."""
    options["similarity"] = "dot"
    return Problem("dot", loss, leaves, arguments, options, learnt, extras=(DOT,))


def _one_side(x, numbers, positives, **options):
    """Rows with themselves, without the diagonal: `moves` does not model its rounding."""
    return fastsim.info_nce(x, x, positives, exclude=(numbers, numbers), **options)


def _guided(x, y, guide_x, guide_y, *, backend):
    thresholds = guide_cosines(guide_x, guide_y[: len(guide_x)], backend=backend)
    guide = guide_x, guide_y, thresholds + 0.05
    return log_sum_exp(x, y, scale=10.0, guide=guide, backend=backend)


def _of_rank(kind, x, groups, learnt, **options):
    """The loss of the last rows with all rows but themselves, as on the last rank of a group.

    options: scale, and parameters of the `TileLoss`.
    """
    loss = partial(_of_part, kind)
    extras = (PARTS,)
    return Problem("of a rank", loss, [x], (groups,), options, learnt, extras=extras, exact="torch")


def _of_part(kind, x, groups, *, scale, backend, skip="diagonal", **parameters):
    first = len(x) // 2
    pairs = Pairs(
        row_groups=groups[first:],
        column_groups=groups,
        negative_target=0.0,
        skip=skip,
        offset=first,
    )
    tile = TileLoss(kind, pairs, **parameters)
    return tile_loss(tile, x[first:], x, scale=scale, formula=None, backend=get(backend))


def _sigmoid(x, y, groups, int8, strided, ids):
    learnt = {"scale": 5.0, "bias": -1.0}
    return [
        Problem("siglip", fastsim.siglip, [x, y], learnt=learnt),
        _dot(fastsim.siglip, [x, y], (), {"scale": 0.05, "bias": -1.0}),
        Problem("of each row", fastsim.siglip, [x, y], (), {"reduction": "none"}, learnt),
        Problem("int8", fastsim.siglip, [x, y], (int8,), learnt=learnt),
        Problem("strided", fastsim.siglip, [x, y], (strided,), learnt=learnt),
    ]


def _squared_error(x, y, groups, int8, strided, ids):
    return [
        Problem("int8", fastsim.matrix_mse, [x, y], (int8,)),
        Problem("strided", fastsim.matrix_mse, [x, y], (strided,)),
        Problem("of each row", fastsim.matrix_mse, [x, y], (int8,), {"reduction": "none"}),
    ]


def _levels(x, y, groups, int8, strided, ids):
    learnt, loss = {"scale": 5.0}, fastsim.cosent_matrix
    levels = torch.tensor([0.0, 1.0], dtype=compute_dtype(x))
    dense = [
        Problem("diagonal", loss, [x, y], (None,), learnt=learnt),
        Problem("with itself", _alone, [x], ((groups, groups),), learnt=learnt),
        Problem("int8", loss, [x, y], (int8,), learnt=learnt),
        _dot(loss, [x, y], (None,), {"scale": 0.05}),
    ]
    # The dense formula takes too long.
    dense = [replace(problem, exact="torch") for problem in dense]
    return [*dense, _of_rank("levels", x, groups, learnt, levels=levels, skip="lower")]


def _alone(x, targets, **options):
    return fastsim.cosent_matrix(x, None, targets, **options)


def _multi_similarity(x, y, groups, int8, strided, ids):
    loss, for_products = fastsim.multi_similarity, {"alpha": 0.1, "beta": 0.5}
    return [
        *_by_groups(loss, x, groups, {}),
        _dot(loss, [x], (groups,), {}, **for_products),
        _of_rank("multi_similarity", x, groups, {}, scale=50.0, positive_scale=2.0, base=0.5),
    ]


def _multi_positive(x, y, groups, int8, strided, ids):
    return [
        *_by_groups(fastsim.nt_xent, x, groups, {"temperature": 0.2}),
        _dot(fastsim.nt_xent, [x], (groups,), {"temperature": 20.0}),
        _of_rank("multi_positive", x, groups, {"scale": 5.0}),
    ]


def _circle(x, y, groups, int8, strided, ids):
    return [
        *_by_groups(fastsim.circle, x, groups, {}),
        _of_rank("circle", x, groups, {}, scale=80.0, margin=0.4),
    ]


def _by_groups(loss, x, groups, learnt):
    return [
        Problem("with itself", loss, [x], (groups,), {}, learnt),
        Problem("of each row", loss, [x], (groups,), {"reduction": "none"}, learnt),
    ]


def _decoupled(x, y, groups, int8, strided, ids):
    loss, learnt = fastsim.decoupled_contrastive, {"temperature": 0.1}
    return [
        Problem("positives", loss, [x, y], learnt=learnt),
        Problem("shared positives", loss, [x, y], (groups,), learnt=learnt),
        Problem("of each row", loss, [x, y], (), {"reduction": "none"}, learnt),
        _dot(loss, [x, y], (), {"temperature": 20.0}),
    ]


def _closest(x, y, groups, int8, strided, ids):
    return [
        Problem("semi-hard", fastsim.full_triplet, [x, y]),
        Problem("hard", fastsim.full_triplet, [x, y], (), {"mining": "hard"}),
        Problem("ids", fastsim.full_triplet, [x, y], (), {"exclude": ids}),
    ]


def _hardest(x, y, groups, int8, strided, ids):
    return [
        Problem(name, fastsim.batch_hard_triplet, [x], (groups,), {"distance": name})
        for name in ("euclidean", "cosine")
    ]


_KINDS = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "squared_error": _squared_error,
    "multi_similarity": _multi_similarity,
    "multi_positive": _multi_positive,
    "circle": _circle,
    "decoupled": _decoupled,
    "levels": _levels,
    "closest": _closest,
    "hardest": _hardest,
}
KINDS = tuple(_KINDS)
