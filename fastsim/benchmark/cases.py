"""The cases that are measured: every loss with its inputs, its options and its least work.

Work is counted in products of the score matrix: one is 2 N M D floating-point operations. A loss
that needs every score takes one product forward. With the gradients of both sides it takes three,
or four if columns are normalised too, or one if the gradient touches one candidate of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

import fastsim
from fastsim.benchmark.dtypes import AUTOCAST

# The cosine of an anchor and its positive. The closest of a thousand negatives is about as close:
# the batch is half learnt, and no softmax is saturated.
POSITIVE_COSINE = 0.15
MEMBERS = 4  # rows of a group
NEGATIVES_OF_ROW = 2  # hard negatives of each row
LEVELS = 26  # distinct labels of graded sentence pairs
SIZES = (64, 512, 2048, 8192, 16384)
DIMS = (384, 768)
# The largest of SIZES at which every loss is measured; only headline losses are measured at more.
LARGEST_COMMON_SIZE = 2048


@dataclass(frozen=True)
class Problem:
    """The arguments of one call of a loss.

    leaves: the tensors that need gradients. arguments: the other positional arguments.
    autocast: the dtype of the autocast context of the call, or None.
    """

    case: "Case"
    leaves: list[torch.Tensor]
    arguments: tuple = ()
    options: dict = field(default_factory=dict)
    autocast: torch.dtype | None = None

    @property
    def rows(self):
        return self.leaves[0].shape[0]

    def to(self, dtype):
        """The same problem with leaves of another dtype, without autocast."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.leaves]
        return Problem(self.case, leaves, self.arguments, self.options)


@dataclass(frozen=True)
class Case:
    """A loss with the options and inputs with which it is measured.

    products: the products of the score matrix, forward and forward + backward; (0, 0) without one.
    sizes, dims: the default N and D. error_rows: the N at which errors are measured; there the
    dense formula in float64 is affordable. row_arguments: the places of the arguments that have one
    row for each row of x.
    """

    name: str
    function: Callable
    make: Callable  # (rows, width, generator) -> (leaves, arguments)
    options: dict
    products: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = tuple(size for size in SIZES if size <= LARGEST_COMMON_SIZE)
    dims: tuple[int, ...] = DIMS
    error_rows: int = 512
    row_arguments: tuple[int, ...] = ()

    def problem(
        self, rows, width, *, device="cpu", dtype=torch.float32, autocast=None, seed=0, **options
    ):
        """A `Problem` of that size, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        leaves, arguments = self.make(rows, width, generator)
        leaves = [t.to(device, dtype).requires_grad_() for t in leaves]
        arguments = _to_device(device, arguments)
        return Problem(self, leaves, arguments, self.options | options, autocast)

    def flop(self, rows, width, *, backward=True):
        """The least number of floating-point operations in products of the score matrix."""
        return 2 * self.products[backward] * rows * rows * width


def problem_in(dtype_name):
    """The options of `Case.problem` for a name in `DTYPES`."""
    if dtype_name == AUTOCAST:
        return {"dtype": torch.float32, "autocast": torch.bfloat16}
    return {"dtype": getattr(torch, dtype_name)}


def _to_device(device, value):
    """A tensor, or nested tuples of tensors, on the device."""
    if isinstance(value, tuple):
        return tuple(_to_device(device, part) for part in value)
    return value.to(device)


def _normal(*shape, generator):
    return torch.randn(*shape, generator=generator)


def _pairs(rows, width, generator):
    x = torch.nn.functional.normalize(_normal(rows, width, generator=generator), dim=1)
    y = torch.nn.functional.normalize(_normal(rows, width, generator=generator), dim=1)
    # The rows have norms other than one, since normalising is part of the loss.
    return [3 * x, 2 * (POSITIVE_COSINE * x + y)], ()


def _groups(rows):
    return torch.arange(rows) // MEMBERS


def _one_side(rows, width, generator):
    (x, _), _ = _pairs(rows, width, generator)
    return [x], (_groups(rows),)


def _grouped(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    groups = _groups(rows)
    return leaves, ((groups, groups),)


def _unevenly_grouped(rows, width, generator):
    """Random groups of several sizes; a group may have more rows on one side than on the other."""
    leaves, _ = _pairs(rows, width, generator)
    most = max(1, rows // MEMBERS)
    groups = (torch.randint(0, most, (rows,), generator=generator) for _ in leaves)
    return leaves, (tuple(groups),)


def _with_teacher(rows, width, generator):
    """Embeddings, and those of a teacher, which partly agree with them."""
    leaves, _ = _pairs(rows, width, generator)
    noise, _ = _pairs(rows, width, generator)
    return leaves, tuple(leaf.detach() + part for leaf, part in zip(leaves, noise, strict=True))


def _with_own_negatives(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return [*leaves, _normal(rows, NEGATIVES_OF_ROW, width, generator=generator)], ()


def _own_negatives(x, y, own_negatives, **options):
    return fastsim.info_nce(x, y, own_negatives=own_negatives, **options)


def _with_references(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (_normal(rows, width, generator=generator),)


def _references(x, y, references, **options):
    return fastsim.info_nce(x, y, references=references.to(x.dtype), **options)


def _with_bias(rows, width, generator):
    """Embeddings, and minus the logarithms of the candidates' sampling probabilities."""
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (-torch.rand(rows, generator=generator).log(),)


def _biased(x, y, bias, **options):
    return fastsim.info_nce(x, y, candidate_bias=bias, **options)


def _with_temperature(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return [*leaves, torch.tensor(0.05)], ()


def _learnt_temperature(x, y, temperature, **options):
    return fastsim.info_nce(x, y, temperature=temperature, **options)


def _with_scale_and_bias(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return [*leaves, torch.tensor(10.0), torch.tensor(-10.0)], ()


def _learnt_scale_and_bias(x, y, scale, bias, **options):
    return fastsim.siglip(x, y, scale=scale, bias=bias, **options)


def prefixes(width):
    """The widths of a sweep over prefixes: 384, 256, 128 and 64 for a width of 384."""
    return tuple(dict.fromkeys(max(width * part // 6, min(width, 4)) for part in (6, 4, 2, 1)))


@cache
def _matryoshka(width, **options):
    """The module, created once, as in training."""
    return fastsim.losses.Matryoshka(fastsim.losses.InfoNCE(**options), prefixes(width))


def _prefixes(x, y, **options):
    return _matryoshka(x.shape[1], **options)(x, y)


def _guided(x, y, guide_x, guide_y, **options):
    return fastsim.info_nce(x, y, guide=(guide_x, guide_y), **options)


def _levels(count, generator):
    return torch.randint(0, LEVELS, (count,), generator=generator).float()


def _scores(rows, width, generator):
    return [_normal(rows, generator=generator).tanh()], (_levels(rows, generator),)


def _ranked_scores(rows, width, generator):
    labels = torch.randperm(rows, generator=generator).float()
    return [_normal(rows, generator=generator).tanh()], (labels,)


def _labelled(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (_levels(rows, generator),)


def _targeted(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (_normal(rows, generator=generator).tanh(),)


def _triplets(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return [*leaves, 2 * _normal(rows, width, generator=generator) / width**0.5], ()


_LISTS = {"sizes": (10_000, 1_000_000), "dims": (1,), "error_rows": 2048}

CASES = {
    case.name: case
    for case in (
        Case("info_nce", fastsim.info_nce, _pairs, {"temperature": 0.05}, (1, 3), SIZES),
        Case(
            "info_nce symmetric",
            fastsim.info_nce,
            _pairs,
            {"temperature": 0.05, "symmetric": True},
            (1, 4),
            SIZES,
        ),
        Case("info_nce learnt", _learnt_temperature, _with_temperature, {}, (1, 3)),
        Case(
            "info_nce directions",
            fastsim.info_nce,
            _pairs,
            {"temperature": 0.05, "directions": ("query_to_doc", "query_to_query", "doc_to_doc")},
            (3, 7),
        ),
        Case(
            "info_nce own negatives",
            _own_negatives,
            _with_own_negatives,
            {"temperature": 0.05},
            (1, 3),
        ),
        Case("info_nce references", _references, _with_references, {"temperature": 0.05}, (2, 5)),
        Case(
            "info_nce guided",
            _guided,
            _with_teacher,
            {"temperature": 0.05},
            (2, 4),
            row_arguments=(0,),
        ),
        Case(
            "info_nce smoothed",
            fastsim.info_nce,
            _pairs,
            {"temperature": 0.05, "label_smoothing": 0.1},
            (1, 3),
        ),
        Case("info_nce biased", _biased, _with_bias, {"temperature": 0.05}, (1, 3)),
        Case("info_nce prefixes", _prefixes, _pairs, {"temperature": 0.05}, (1, 3)),
        Case("siglip", fastsim.siglip, _pairs, {"scale": 10.0, "bias": -10.0}, (1, 3), SIZES),
        Case("siglip learnt", _learnt_scale_and_bias, _with_scale_and_bias, {}, (1, 3)),
        Case("siglip groups", fastsim.siglip, _grouped, {"scale": 10.0, "bias": -10.0}, (1, 3)),
        Case(
            "siglip weighed",
            fastsim.siglip,
            _unevenly_grouped,
            {"scale": 10.0, "bias": -10.0, "positive_weight": "both"},
            (1, 3),
        ),
        Case("full_triplet", fastsim.full_triplet, _pairs, {"margin": 0.25}, (1, 1), SIZES),
        Case("sup_con", fastsim.sup_con, _one_side, {"temperature": 0.1}, (1, 3)),
        Case("nt_xent", fastsim.nt_xent, _one_side, {"temperature": 0.1}, (1, 3)),
        Case(
            "multi_similarity",
            fastsim.multi_similarity,
            _one_side,
            {"alpha": 2.0, "beta": 50.0, "base": 0.5},
            (1, 3),
        ),
        Case("circle", fastsim.circle, _one_side, {"gamma": 80.0, "margin": 0.4}, (1, 3)),
        Case(
            "decoupled_contrastive",
            fastsim.decoupled_contrastive,
            _pairs,
            {"temperature": 0.1},
            (1, 3),
        ),
        Case(
            "debiased_contrastive",
            fastsim.debiased_contrastive,
            _pairs,
            {"temperature": 0.5, "tau_plus": 0.1},
            (1, 3),
        ),
        Case("batch_hard_triplet", fastsim.batch_hard_triplet, _one_side, {"margin": 1.0}, (1, 1)),
        Case(
            "matrix_cross_entropy",
            fastsim.matrix_cross_entropy,
            _grouped,
            {"temperature": 1.0},
            (1, 3),
        ),
        Case("matrix_mse", fastsim.matrix_mse, _grouped, {}, (1, 3)),
        Case(
            "distill",
            fastsim.distill,
            _with_teacher,
            {"temperature": 0.05, "teacher_temperature": 0.05},
            (2, 4),
            row_arguments=(0,),
        ),
        Case(
            "distill margins",
            fastsim.distill,
            _with_teacher,
            {"kind": "margin_mse"},
            (2, 4),
            row_arguments=(0,),
        ),
        Case(
            "cosent_matrix", fastsim.cosent_matrix, _grouped, {"scale": 20.0}, (1, 4), error_rows=64
        ),
        Case("cosent", fastsim.cosent, _scores, {"scale": 20.0}, **_LISTS),
        Case("cosent distinct", fastsim.cosent, _ranked_scores, {"scale": 20.0}, **_LISTS),
        Case("angle", fastsim.angle, _labelled, {"scale": 20.0}),
        Case("cosine_regression", fastsim.cosine_regression, _targeted, {}),
        Case("triplet_margin", fastsim.triplet_margin, _triplets, {"margin": 1.0}),
    )
}
