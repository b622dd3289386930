"""What is measured: every loss with its inputs, its options and its least work.

Work is counted in products of the score matrix: one is 2 N M D floating-point operations. A loss
that has to see every score takes one forward; with the gradient of both sides three, four where
columns are normalised too, and one where the gradient touches a candidate a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

import fastsim
from fastsim.benchmark.dtypes import AUTOCAST

# Cosine of an anchor with its positive, about that of its closest negative among a thousand: a
# batch half learnt, in which no softmax is saturated.
ALIKE = 0.15
MEMBERS = 4  # rows of a group
OWN = 2  # hard negatives of each row
LEVELS = 26  # distinct labels of graded sentence pairs
SIZES = (64, 512, 2048, 8192, 16384)
DIMS = (384, 768)
UP_TO = 2048  # losses that are not among the headlines, unless sizes are asked for


@dataclass(frozen=True)
class Problem:
    """One call: `leaves` want gradients, `given` are the loss's other positional arguments.

    autocast: the dtype of the context in which the loss is called, None outside of one.
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
        """The same problem with leaves of another type, outside of a context."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.leaves]
        return Problem(self.case, leaves, self.arguments, self.options)


@dataclass(frozen=True)
class Case:
    """A loss as it is measured.

    products: of the score matrix, forward and forward + backward; (0, 0) where there is none.
    sizes, dims: by default. exact: the largest N at which the dense formula is affordable twice
    over in float64, for the error. of_rows: the places of the given arguments that have a row for
    each of x.
    """

    name: str
    function: Callable
    make: Callable  # (rows, width, generator) -> (leaves, given)
    options: dict
    products: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = tuple(size for size in SIZES if size <= UP_TO)
    dims: tuple[int, ...] = DIMS
    exact: int = 512
    of_rows: tuple[int, ...] = ()

    def problem(
        self, rows, width, *, device="cpu", dtype=torch.float32, autocast=None, seed=0, **options
    ):
        """Inputs of that size, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        leaves, given = self.make(rows, width, generator)
        leaves = [t.to(device, dtype).requires_grad_() for t in leaves]
        return Problem(self, leaves, _on(device, given), self.options | options, autocast)

    def flop(self, rows, width, *, backward=True):
        """The least floating-point operations in products of the score matrix."""
        return 2 * self.products[backward] * rows * rows * width


def problem_in(numbers):
    """The options of `Case.problem` for a name in `DTYPES`."""
    if numbers == AUTOCAST:
        return {"dtype": torch.float32, "autocast": torch.bfloat16}
    return {"dtype": getattr(torch, numbers)}


def _on(device, value):
    """Tensors in tuples of tuples, on the device."""
    return tuple(_on(device, v) for v in value) if isinstance(value, tuple) else value.to(device)


def _normal(*shape, generator):
    return torch.randn(*shape, generator=generator)


def _pairs(rows, width, generator):
    x = torch.nn.functional.normalize(_normal(rows, width, generator=generator), dim=1)
    y = torch.nn.functional.normalize(_normal(rows, width, generator=generator), dim=1)
    # Lengths that are not one: normalising is part of the loss.
    return [3 * x, 2 * (ALIKE * x + y)], ()


def _groups(rows):
    return torch.arange(rows) // MEMBERS


def _one_side(rows, width, generator):
    (x, _), _ = _pairs(rows, width, generator)
    return [x], (_groups(rows),)


def _grouped(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    groups = _groups(rows)
    return leaves, ((groups, groups),)


def _captioned(rows, width, generator):
    """Groups of several sizes, of as many rows on one side as on the other or not."""
    leaves, _ = _pairs(rows, width, generator)
    most = max(1, rows // MEMBERS)
    groups = (torch.randint(0, most, (rows,), generator=generator) for _ in leaves)
    return leaves, (tuple(groups),)


def _taught(rows, width, generator):
    """Embeddings, and a teacher's of the same rows that agree with theirs in part."""
    leaves, _ = _pairs(rows, width, generator)
    other, _ = _pairs(rows, width, generator)
    return leaves, tuple(mine.detach() + theirs for mine, theirs in zip(leaves, other, strict=True))


def _with_own_negatives(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return [*leaves, _normal(rows, OWN, width, generator=generator)], ()


def _own_negatives(x, y, own_negatives, **options):
    return fastsim.info_nce(x, y, own_negatives=own_negatives, **options)


def _with_references(rows, width, generator):
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (_normal(rows, width, generator=generator),)


def _references(x, y, references, **options):
    return fastsim.info_nce(x, y, references=references.to(x.dtype), **options)


def _drawn(rows, width, generator):
    """Candidates, and the logarithms of what they were drawn in proportion to."""
    leaves, _ = _pairs(rows, width, generator)
    return leaves, (torch.rand(rows, generator=generator).log(),)


def _biased(x, y, log_q, **options):
    return fastsim.info_nce(x, y, candidate_bias=-log_q, **options)


def prefixes(width):
    """The widths of a sweep: of 384 these are 384, 256, 128 and 64."""
    return tuple(dict.fromkeys(max(width * part // 6, min(width, 4)) for part in (6, 4, 2, 1)))


@cache
def _of_prefixes(width, **options):
    """The module, made once, as where a model is trained."""
    return fastsim.losses.Matryoshka(fastsim.losses.InfoNCE(**options), prefixes(width))


def _prefixes(x, y, **options):
    return _of_prefixes(x.shape[1], **options)(x, y)


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


_LISTS = {"sizes": (10_000, 1_000_000), "dims": (1,), "exact": 2048}

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
        Case("info_nce guided", _guided, _taught, {"temperature": 0.05}, (2, 4), of_rows=(0,)),
        Case(
            "info_nce smoothed",
            fastsim.info_nce,
            _pairs,
            {"temperature": 0.05, "label_smoothing": 0.1},
            (1, 3),
        ),
        Case("info_nce biased", _biased, _drawn, {"temperature": 0.05}, (1, 3)),
        Case("info_nce prefixes", _prefixes, _pairs, {"temperature": 0.05}, (1, 3)),
        Case("siglip", fastsim.siglip, _pairs, {"scale": 10.0, "bias": -10.0}, (1, 3), SIZES),
        Case("siglip groups", fastsim.siglip, _grouped, {"scale": 10.0, "bias": -10.0}, (1, 3)),
        Case(
            "siglip weighed",
            fastsim.siglip,
            _captioned,
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
            _taught,
            {"temperature": 0.05, "teacher_temperature": 0.05},
            (2, 4),
            of_rows=(0,),
        ),
        Case(
            "distill margins",
            fastsim.distill,
            _taught,
            {"kind": "margin_mse"},
            (2, 4),
            of_rows=(0,),
        ),
        Case("cosent_matrix", fastsim.cosent_matrix, _grouped, {"scale": 20.0}, (1, 4), exact=64),
        Case("cosent", fastsim.cosent, _scores, {"scale": 20.0}, **_LISTS),
        Case("cosent distinct", fastsim.cosent, _ranked_scores, {"scale": 20.0}, **_LISTS),
        Case("angle", fastsim.angle, _labelled, {"scale": 20.0}),
        Case("cosine_regression", fastsim.cosine_regression, _targeted, {}),
        Case("triplet_margin", fastsim.triplet_margin, _triplets, {"margin": 1.0}),
    )
}
