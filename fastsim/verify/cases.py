"""The losses of each kind, with the options and inputs that kernels go wrong on."""

from dataclasses import dataclass, field

import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.extras import GUIDE, PARTS, UNTARGETED, extras_of
from fastsim.engine.autograd import tile_loss
from fastsim.engine.log_sum_exp import guide_cosines, log_sum_exp
from fastsim.pairs import Pairs
from fastsim.tile import Tile


@dataclass(frozen=True)
class Problem:
    """loss(*leaves, *given, **options, backend=...); `learnt` options want a gradient too.

    extras: what of fastsim/backends/extras.py a backend needs to serve it.
    """

    name: str
    loss: object
    leaves: list
    given: tuple = ()
    options: dict = field(default_factory=dict)
    learnt: dict = field(default_factory=dict)
    finite: bool = True
    extras: tuple = ()


def _rows(generator, rows, width, dtype):
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def _ids(generator, rows, columns):
    ids = torch.randint(0, max(2, rows // 2), (rows + columns,), generator=generator)
    return ids[:rows], ids[rows:]


def problems(kind, shape, dtype, seed=0):
    """The problems of a kind at one shape (rows, columns, width), on the CPU."""
    rows, columns, width = shape
    g = torch.Generator().manual_seed(seed)
    x, y = _rows(g, rows, width, dtype), _rows(g, max(rows, columns), width, dtype)
    groups = torch.randint(0, max(2, rows // 3), (rows,), generator=g)
    int8 = torch.randint(-1, 2, (rows, len(y)), generator=g).to(torch.int8)
    strided = (torch.randint(0, 5, (len(y), rows), generator=g) / 2 - 1).to(torch.bfloat16).T
    ids = _ids(g, rows, len(y))
    zero, nan, tied = x.clone(), x.clone(), y.clone()
    zero[rows // 2], nan[0, 0] = 0, torch.nan
    tied[rows // 2 :] = tied[: len(y) - rows // 2].clone()
    made = _KINDS[kind](x, y, groups, int8, strided, ids)
    first = made[0]
    for name, left in (("zero row", zero), ("NaN", nan)):
        leaves = [left, *first.leaves[1:]]
        options = first.options
        made.append(
            Problem(name, first.loss, leaves, first.given, options, first.learnt, name != "NaN")
        )
    if len(first.leaves) == 2:
        made.append(Problem("ties", first.loss, [x, tied], first.given, first.options))
    return made


def _softmax(x, y, groups, int8, strided, ids):
    warm = {"temperature": 0.1}
    other_rows = x.flip(1).contiguous(), y.flip(1).contiguous()
    return [
        Problem("info_nce", fastsim.info_nce, [x, y], learnt=warm),
        Problem("symmetric", fastsim.info_nce, [x, y], (), {"symmetric": True}, warm),
        Problem("ids", fastsim.info_nce, [x, y], (), {"exclude": ids, "margin": 0.1}, warm),
        _with_extras("above", x, y, warm, exclude_above=0.1),
        _with_extras("dot", x, y, {"temperature": 20.0}, similarity="dot"),
        _with_extras("bias", x, y, warm, candidate_bias=y[:, 0].float()),
        _with_extras("guided positives", x, y, warm, guide=other_rows),
        Problem("of each row", fastsim.info_nce, [x, y], (), {"reduction": "none"}, warm),
        Problem("with itself", fastsim.sup_con, [x], (groups,), learnt=warm),
        Problem("int8", fastsim.matrix_cross_entropy, [x, y], (int8,)),
        Problem("strided", fastsim.matrix_cross_entropy, [x, y], (strided,)),
        Problem("guide", _guided, [x, y], other_rows, extras=(UNTARGETED, GUIDE)),
        Problem("of a rank", _of_part, [x], (groups,), learnt=warm, extras=(PARTS,)),
    ]


def _with_extras(name, x, y, learnt, **options):
    extras = extras_of(**options)
    return Problem(name, fastsim.info_nce, [x, y], (), options, learnt, extras=extras)


def _guided(x, y, guide_x, guide_y, *, backend):
    thresholds = guide_cosines(guide_x, guide_y[: len(guide_x)], backend=backend)
    guide = guide_x, guide_y, thresholds + 0.05
    return log_sum_exp(x, y, scale=10.0, guide=guide, backend=backend)


def _of_part(x, groups, *, temperature, backend):
    """Of the last rows, as of the last rank of a group, which leave themselves out."""
    first = len(x) // 2
    pairs = Pairs(
        row_groups=groups[first:],
        column_groups=groups,
        negative_target=0.0,
        skip="diagonal",
        offset=first,
    )
    tile, scale = Tile("softmax", pairs, normalise=True), 1 / temperature
    return tile_loss(tile, x[first:], x, scale=scale, formula=None, backend=get(backend))


def _sigmoid(x, y, groups, int8, strided, ids):
    learnt = {"scale": 5.0, "bias": -1.0}
    return [
        Problem("siglip", fastsim.siglip, [x, y], learnt=learnt),
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
    learnt = {"scale": 5.0}
    return [
        Problem("diagonal", fastsim.cosent_matrix, [x, y], (None,), learnt=learnt),
        Problem("with itself", _alone, [x], ((groups, groups),), learnt=learnt),
        Problem("int8", fastsim.cosent_matrix, [x, y], (int8,), learnt=learnt),
    ]


def _alone(x, targets, **options):
    return fastsim.cosent_matrix(x, None, targets, **options)


def _by_groups(loss, **learnt):
    def make(x, y, groups, int8, strided, ids):
        return [
            Problem("with itself", loss, [x], (groups,), {}, learnt),
            Problem("of each row", loss, [x], (groups,), {"reduction": "none"}, learnt),
        ]

    return make


def _decoupled(x, y, groups, int8, strided, ids):
    loss, warm, dot = fastsim.decoupled_contrastive, {"temperature": 0.1}, {"similarity": "dot"}
    return [
        Problem("positives", loss, [x, y], learnt=warm),
        Problem("shared positives", loss, [x, y], (groups,), learnt=warm),
        Problem("of each row", loss, [x, y], (), {"reduction": "none"}, warm),
        Problem("dot", loss, [x, y], (), dot, {"temperature": 20.0}, extras=extras_of(**dot)),
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
    "multi_similarity": _by_groups(fastsim.multi_similarity),
    "multi_positive": _by_groups(fastsim.nt_xent, temperature=0.2),
    "circle": _by_groups(fastsim.circle),
    "decoupled": _decoupled,
    "levels": _levels,
    "closest": _closest,
    "hardest": _hardest,
}
KINDS = tuple(_KINDS)
