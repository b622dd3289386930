"""The registry that the tests are generated from: every loss with its oracle and its options.

A case makes fresh random inputs of a shape; the same case serves every backend and dtype.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

import fastsim
from fastsim import losses
from fastsim.backends.extras import TEACHER, extras_of
from tests import case_inputs as draw
from tests import oracles
from tests.seeds import fresh
from tests.thresholds import are_clear

# (rows, columns, width): alone, tiny and square, with more columns or one more, ragged against
# every vector, tile and panel width.
SHAPES = ((1, 1, 6), (5, 5, 4), (13, 29, 18), (74, 75, 34))


@dataclass(frozen=True)
class Case:
    """`make(n, m, d, generator)` returns (embeddings, other arguments, options)."""

    name: str
    loss: Any
    oracle: Any
    make: Any
    reduces: bool = True
    largest: int = 10_000  # most scores that the oracle can afford
    tile: bool = True
    counted: Any = None  # of the other arguments, what the mean divides by; None: the rows
    kind: str | None = None  # which a backend may have no kernels of
    extras: tuple = ()  # what of `EXTRAS` it needs
    dot: bool = False  # its scores are dot products: a zero vector is a point like others
    exact: bool = True  # the gradient is that of the value: no part of it is held constant

    def __repr__(self):
        return self.name


def _case(name, loss, *, make=draw.two_sides, kind=None, largest=10_000, **options):
    """Two-sided loss: `options` values may be callables of (n, m, generator)."""

    def build(n, m, d, generator):
        made = {k: v(n, m, generator) if callable(v) else v for k, v in options.items()}
        targets = [made.pop("targets")] if "targets" in made else []
        positives = [made.pop("positives")] if "positives" in made else []
        return make(n, m, d, generator), positives + targets, made

    largest = 800 if loss is fastsim.cosent_matrix else largest
    return Case(
        name,
        loss,
        getattr(oracles, loss.__name__),
        build,
        reduces=loss is not fastsim.cosent_matrix,
        largest=largest,
        kind=kind,
        extras=_extras(loss, **options),
        dot=options.get("similarity") == "dot",
    )


def _extras(loss, *, directions=(), **options):
    if loss is fastsim.late_interaction:
        return ()
    named = {"similarity", "exclude_above", "guide", "candidate_bias"} & options.keys()
    given = {name: options[name] for name in named}
    weighed = "positive_weight" in options
    return extras_of(**given, further=len(directions) > 1, weighed=weighed)


def rows_with_a_positive(groups):
    return sum(int((groups == g).sum() > 1) for g in groups)


def positive_pairs(groups):
    return sum(int((groups == g).sum()) - 1 for g in groups)


def rows_with_both(groups):
    return rows_with_a_positive(groups) if (groups != groups[0]).any() else 0


def _grouped(**options):
    def make(n, m, d, generator):
        tensors, others, _ = draw.one_group(n, m, d, generator)
        return tensors, others, dict(options)

    return make


def _late(name, **options):
    case = _case(f"late_interaction{name}", fastsim.late_interaction, make=draw.texts, **options)
    return replace(case, tile=False, largest=800, kind="max_sim")


def _taught(name, *, given=False, positives=None, **options):
    """Distillation from a teacher's embeddings, or from its scores."""

    def make(n, m, d, generator):
        others = [
            draw.embeddings(n, 5, generator=generator),
            draw.embeddings(m, 5, generator=generator),
        ]
        if given:
            others = [draw.embeddings(n, m, generator=generator).to(torch.bfloat16)]
        made = options if positives is None else options | {"positives": positives(n, m, generator)}
        return draw.two_sides(n, m, d, generator), others, dict(made)

    kind = "squared_error" if options.get("kind") == "margin_mse" else "distillation"
    case = Case(f"distill{name}", fastsim.distill, oracles.distill, make, kind=kind)
    return replace(case, extras=(TEACHER,))


CASES = (
    _case("info_nce", fastsim.info_nce),
    _case("info_nce-cold", fastsim.info_nce, temperature=0.01),
    _case("info_nce-symmetric", fastsim.info_nce, symmetric=True),
    _case("info_nce-exclude", fastsim.info_nce, exclude=draw.ids, margin=0.2),
    _case("info_nce-above", fastsim.info_nce, exclude_above=0.2, margin=0.1),
    _case(
        "info_nce-above-symmetric",
        fastsim.info_nce,
        positives=draw.columns,
        exclude=draw.ids,
        exclude_above=0.2,
        symmetric=True,
    ),
    _case("info_nce-positives", fastsim.info_nce, positives=draw.columns),
    _case(
        "info_nce-everything",
        fastsim.info_nce,
        positives=draw.columns,
        exclude=draw.ids,
        symmetric=True,
        margin=0.1,
    ),
    _case("info_nce-dot", fastsim.info_nce, temperature=2.0, similarity="dot", margin=0.3),
    _case("info_nce-bias", fastsim.info_nce, positives=draw.columns, candidate_bias=draw.log_q),
    _case(
        "info_nce-dot-everything",
        fastsim.info_nce,
        positives=draw.columns,
        temperature=2.0,
        exclude=draw.ids,
        exclude_above=0.2,
        symmetric=True,
        candidate_bias=draw.log_q,
        similarity="dot",
    ),
    _case("info_nce-smooth", fastsim.info_nce, label_smoothing=0.1, candidate_bias=draw.log_q),
    _case(
        "info_nce-guide",
        fastsim.info_nce,
        positives=draw.columns,
        guide=draw.guides,
        guide_margin=0.1,
        symmetric=True,
    ),
    _case(
        "info_nce-directions",
        fastsim.info_nce,
        positives=draw.columns,
        temperature=0.2,
        exclude=draw.ids,
        guide=draw.guides,
        guide_margin=0.2,
        guide_strategy="relative",
        directions=draw.DIRECTIONS,
        largest=800,
    ),
    _case(
        "info_nce-directions-bias",
        fastsim.info_nce,
        positives=draw.columns,
        temperature=0.5,
        candidate_bias=draw.log_q,
        directions=draw.DIRECTIONS,
        largest=800,
    ),
    _case("decoupled_contrastive", fastsim.decoupled_contrastive, kind="decoupled"),
    _case(
        "decoupled_contrastive-positives",
        fastsim.decoupled_contrastive,
        positives=draw.columns,
        temperature=0.02,
        kind="decoupled",
    ),
    _case(
        "decoupled_contrastive-dot-bias",
        fastsim.decoupled_contrastive,
        kind="decoupled",
        positives=draw.columns,
        temperature=2.0,
        candidate_bias=draw.log_q,
        similarity="dot",
    ),
    _case("debiased_contrastive", fastsim.debiased_contrastive, kind="debiased"),
    _case(
        "debiased_contrastive-priors",
        fastsim.debiased_contrastive,
        tau_plus=draw.priors,
        kind="debiased",
    ),
    _case(
        "debiased_contrastive-hard",
        fastsim.debiased_contrastive,
        positives=draw.columns,
        temperature=0.1,
        tau_plus=draw.priors,
        beta=1.5,
        exclude=draw.ids,
        kind="debiased",
    ),
    *(
        Case(
            f"{loss.__name__}-dot",
            loss,
            getattr(oracles, loss.__name__),
            _grouped(**options, similarity="dot"),
            counted=counted,
            extras=extras_of(similarity="dot"),
            dot=True,
        )
        for loss, options, counted in (
            (fastsim.sup_con, {"temperature": 2.0}, rows_with_a_positive),
            (fastsim.nt_xent, {"temperature": 2.0}, positive_pairs),
            (fastsim.multi_similarity, {"alpha": 0.5, "beta": 0.7}, None),
        )
    ),
    Case("sup_con", fastsim.sup_con, oracles.sup_con, draw.one_group, counted=rows_with_a_positive),
    _case("siglip", fastsim.siglip),
    _case("siglip-signs", fastsim.siglip, targets=draw.signs),
    _case("siglip-soft", fastsim.siglip, targets=draw.transposed_targets, scale=5.0, bias=1.0),
    _case("siglip-dot", fastsim.siglip, targets=draw.signs, scale=0.5, similarity="dot"),
    _case("siglip-groups", fastsim.siglip, targets=draw.groups),
    *(
        _case(
            f"siglip-groups-{weight}", fastsim.siglip, targets=draw.groups, positive_weight=weight
        )
        for weight in ("row", "both")
    ),
    _case("matrix_cross_entropy", fastsim.matrix_cross_entropy, targets=None),
    _case("matrix_cross_entropy-soft", fastsim.matrix_cross_entropy, targets=draw.soft_targets),
    _case(
        "matrix_cross_entropy-groups",
        fastsim.matrix_cross_entropy,
        targets=draw.groups,
        temperature=0.1,
    ),
    _case(
        "matrix_cross_entropy-dot-bias",
        fastsim.matrix_cross_entropy,
        targets=draw.soft_targets,
        candidate_bias=draw.log_q,
        similarity="dot",
    ),
    _case("matrix_mse-soft", fastsim.matrix_mse, targets=draw.soft_targets),
    _case("matrix_mse-groups", fastsim.matrix_mse, targets=draw.groups),
    _case("full_triplet", fastsim.full_triplet),
    _case("full_triplet-hard", fastsim.full_triplet, mining="hard", margin=0.5),
    _case("full_triplet-exclude", fastsim.full_triplet, exclude=draw.ids),
    Case("nt_xent", fastsim.nt_xent, oracles.nt_xent, draw.one_group, counted=positive_pairs),
    Case(
        "nt_xent-cold",
        fastsim.nt_xent,
        oracles.nt_xent,
        _grouped(temperature=0.01),
        counted=positive_pairs,
    ),
    Case("multi_similarity", fastsim.multi_similarity, oracles.multi_similarity, draw.one_group),
    Case(
        "multi_similarity-options",
        fastsim.multi_similarity,
        oracles.multi_similarity,
        _grouped(alpha=7.0, beta=20.0, base=0.1),
    ),
    Case("circle", fastsim.circle, oracles.circle, draw.one_group, kind="circle", exact=False),
    Case(
        "circle-options",
        fastsim.circle,
        oracles.circle,
        _grouped(gamma=12.0, margin=-0.1),
        kind="circle",
        exact=False,
    ),
    *(
        Case(
            f"batch_hard_triplet-{name}",
            fastsim.batch_hard_triplet,
            oracles.batch_hard_triplet,
            _grouped(**options),
            counted=rows_with_both,
        )
        for name, options in {
            "euclidean": {},
            "cosine": {"distance": "cosine", "margin": 0.3},
            "soft": {"soft": True, "margin": 0.0},
            "cosine-soft": {"distance": "cosine", "soft": True},
        }.items()
    ),
    *(
        Case(
            f"{loss.__name__}-{distance}",
            loss,
            getattr(oracles, loss.__name__),
            _grouped(distance=distance, margin=margin),
            reduces=False,
            tile=False,
            largest=800,  # of many triplets one is next to the margin, or to another negative
        )
        for loss in (losses.batch_semi_hard_triplet, losses.batch_all_triplet)
        for distance, margin in (("euclidean", 0.5), ("cosine", 0.2))
    ),
    _late(
        "-masks", query_mask=draw.text_mask(0, 3), document_mask=draw.text_mask(1, 5), average=True
    ),
    _late("-dot", similarity="dot", symmetric=True, exclude=draw.ids, temperature=3.0),
    _late(""),
    _case("cosent_matrix-soft", fastsim.cosent_matrix, targets=draw.soft_targets),
    _case("cosent_matrix-groups", fastsim.cosent_matrix, targets=draw.groups, scale=5.0),
    _case(
        "cosent_matrix-dot",
        fastsim.cosent_matrix,
        targets=draw.soft_targets,
        scale=0.5,
        similarity="dot",
    ),
    _case(
        "cosent_matrix-self", fastsim.cosent_matrix, targets=draw.square_groups, make=draw.one_side
    ),
    Case("cosent", fastsim.cosent, oracles.cosent, draw.labelled_scores, reduces=False, tile=False),
    Case(
        "cosent-distinct",
        fastsim.cosent,
        oracles.cosent,
        draw.ranked_scores,
        reduces=False,
        tile=False,
    ),
    _taught("", teacher_temperature=0.1),
    _taught("-scores", given=True, temperature=0.2, teacher_temperature=2.0),
    _taught(
        "-margins",
        kind="margin_mse",
        positives=draw.columns,
        temperature=0.5,
        teacher_temperature=2.0,
    ),
    _taught("-margins-scores", given=True, kind="margin_mse"),
    Case("angle", fastsim.angle, oracles.angle, draw.labelled_pairs, reduces=False, tile=False),
    Case(
        "triplet_margin",
        fastsim.triplet_margin,
        oracles.triplet_margin,
        draw.triplets,
        tile=False,
    ),
    Case(
        "cosine_regression",
        fastsim.cosine_regression,
        oracles.cosine_regression,
        draw.scored_pairs,
        tile=False,
    ),
)

BY_NAME = {case.name: case for case in CASES}


def _sides(case):
    return [t for t in case.make(3, 4, 5, torch.Generator())[0] if t is not None]


WITH_ROWS = tuple(case for case in CASES if _sides(case)[0].dim() > 1)  # no list of scores
TWO_SIDED = tuple(case for case in CASES if len(_sides(case)) > 1)


def is_euclidean(case):
    """Whether a zero vector is a point like others."""
    batch = case.loss.__name__.startswith("batch_") and "cosine" not in case.name
    return batch or case.dot or case.loss is fastsim.triplet_margin


def takes_backend(case):
    """Whether the loss has a choice of backends."""
    return case.loss is not fastsim.triplet_margin


def on_backend(case, backend):
    """Options that choose a backend; none where the loss has no choice."""
    return {"backend": backend} if takes_backend(case) else {}


def inputs(case, shape, dtype, seed):
    """Fresh (embeddings in dtype, other arguments, options); seed: the place of `tests.seeds`."""
    generator = fresh(seed)
    while True:
        tensors, others, options = case.make(*shape, generator)
        tensors = [t if t is None else t.to(dtype) for t in tensors]
        if are_clear(case.loss, tensors, others, options):
            return tensors, others, options


def call(function, tensors, others, options):
    """(value, gradients) of function(*tensors, *others, **options); a vector value is weighted."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves, *others, **options)
    weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).reshape(value.shape)
    (value * weights).sum().backward()
    return value.detach(), [t.grad for t in leaves if t is not None]


def call_case(case, tensors, others, options, backend):
    """(value, gradients) of a case's loss on a backend."""
    return call(case.loss, tensors, others, options | on_backend(case, backend))
