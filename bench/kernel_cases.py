"""Further losses of memeff: cases and exact values for bench/parity.py.

    LiT                InfoNCE whose candidates need no gradient
    margin mask        InfoNCE without candidates that score more than a margin above the positive
    q-q and d-d        InfoNCE with further negatives: other anchors for an anchor, and other
                       candidates for its positive
    Matryoshka         the symmetric InfoNCE of every prefix

memeff's label smoothing, and its negatives of a single row, have no counterpart in fastsim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, normalize

import fastsim
from fastsim.benchmark.baselines import memeff
from fastsim.benchmark.baselines.baseline import Baseline, gpu_or_interpreted
from fastsim.benchmark.baselines.sentence_transformers import IdentityEncoder
from fastsim.benchmark.cases import Case

WIDTHS = 64, 128  # memeff takes multiples of 64
MARGIN = 0.1
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_doc")


def _pairs(rows, width, generator):
    return [torch.randn(rows, width, generator=generator) for _ in "xy"], ()


def _locked(rows, width, generator):
    (x, y), _ = _pairs(rows, width, generator)
    return [x], (y,)


def _nested(rows, width, generator):
    return _pairs(rows, WIDTHS[-1], generator)


def _temperature(problem):
    return problem.options["temperature"]


def _locked_side(problem):
    return problem.arguments[0].to(problem.leaves[0].dtype)


# ---- exact values: the dense formulas ----


def _cosines(x, y):
    return normalize(x, dim=1) @ normalize(y, dim=1).T


def _diagonal_cross_entropy(logits):
    """The cross entropy of each row's logits, with the target on the diagonal."""
    return cross_entropy(logits, torch.arange(len(logits)))


def lit(problem):
    def call(x):
        logits = _cosines(x, _locked_side(problem)) / _temperature(problem)
        return _diagonal_cross_entropy(logits)

    return call


def masked(problem):
    def call(x, y):
        scores = _cosines(x, y)
        above = scores > scores.diagonal()[:, None] + MARGIN
        logits = (scores / _temperature(problem)).masked_fill(above, -torch.inf)
        return _diagonal_cross_entropy(logits)

    return call


def both_sides(problem):
    def call(x, y):
        itself = torch.eye(len(x), dtype=torch.bool)
        sides = (_cosines(side, side).masked_fill(itself, -torch.inf) for side in (x, y))
        logits = torch.cat([_cosines(x, y), *sides], 1) / _temperature(problem)
        return _diagonal_cross_entropy(logits)

    return call


def matryoshka(problem):
    def call(x, y):
        logits = [_cosines(x[:, :w], y[:, :w]) / _temperature(problem) for w in WIDTHS]
        losses = [
            _diagonal_cross_entropy(part) + _diagonal_cross_entropy(part.T) for part in logits
        ]
        return sum(loss / 2 for loss in losses)

    return call


# ---- memeff ----


def _qwen3(**fixed):
    """make(problem) for memeff's InfoNCE, without its rescaling of the gradient."""

    def make(problem):
        options = {"margin": memeff.NO_MARGIN, "stable": False} | fixed
        kind = memeff.package().MemoryEfficientQwen3Loss
        return kind(temperature=_temperature(problem), **options)

    return make


def _its_lit(problem):
    loss = memeff.package().MemoryEfficientLiTLoss(_temperature(problem), stable=False)
    return lambda x: loss(x, _locked_side(problem))


def _its_matryoshka(problem):
    kind = memeff.package().MemoryEfficientMatryoshkaCLIPLoss
    return kind(WIDTHS, temperature=_temperature(problem), stable=False)


# ---- ours ----


def _our_lit(problem):
    return lambda x: fastsim.info_nce(
        x, _locked_side(problem), temperature=_temperature(problem), backend="cpu"
    )


def _info_nce(**fixed):
    def make(problem):
        options = {"temperature": _temperature(problem), "backend": "cpu", **fixed}
        return lambda x, y: fastsim.info_nce(x, y, **options)

    return make


def _our_directions(problem):
    from fastsim.integrations import sentence_transformers as losses

    scale = 1 / _temperature(problem)
    loss = losses.MultipleNegativesRankingLoss(
        IdentityEncoder(), scale=scale, directions=DIRECTIONS
    )
    return lambda x, y: loss.compute_loss_from_embeddings([x, y], None)


def _our_matryoshka(problem):
    one = fastsim.losses.InfoNCE(temperature=_temperature(problem), symmetric=True, backend="cpu")
    return fastsim.losses.Matryoshka(one, WIDTHS)


_PLAIN = {"temperature": 0.05}


@dataclass(frozen=True)
class KernelBaseline(Baseline):
    """A baseline of one loss.

    truth: make(problem) of the dense formula. by: the name of the loss in fastsim.
    """

    truth: Callable | None = None
    by: str = ""


def _pair(name, make, options, theirs, ours, truth, by):
    case = Case(name, None, make, options)
    peer = KernelBaseline(
        "memeff",
        "memeff",
        {name: theirs},
        gpu_or_interpreted,
        drop_in={name: ours},
        truth=truth,
        by=by,
    )
    return case, peer


_RANKING = "fastsim.integrations.sentence_transformers"
PAIRS = [
    _pair("LiT", _locked, _PLAIN, _its_lit, _our_lit, lit, "fastsim.info_nce"),
    _pair(
        "margin mask",
        _pairs,
        _PLAIN,
        _qwen3(margin=MARGIN),
        _info_nce(exclude_above=MARGIN),
        masked,
        "fastsim.info_nce",
    ),
    _pair(
        "q-q and d-d",
        _pairs,
        _PLAIN,
        _qwen3(use_qq_negatives=True, use_dd_negatives=True),
        _our_directions,
        both_sides,
        _RANKING,
    ),
    _pair(
        "Matryoshka",
        _nested,
        _PLAIN,
        _its_matryoshka,
        _our_matryoshka,
        matryoshka,
        "fastsim.losses.Matryoshka",
    ),
]
