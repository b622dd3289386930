"""Wrong arguments: the error names the argument, what was wanted and what came."""

import pytest
import torch

import fastsim
from fastsim import losses

X, Y = torch.randn(4, 6), torch.randn(4, 6)
GROUPS = torch.zeros(4, dtype=torch.long)
SCORES = torch.randn(4)


def wrong(name, kind, pattern, call):
    return pytest.param(call, kind, pattern, id=name)


@pytest.mark.parametrize(
    ("call", "kind", "pattern"),
    [
        wrong("width", ValueError, "candidates: wanted width 6, that of anchors, got 5",
              lambda: fastsim.info_nce(X, Y[:, :5])),
        wrong("fewer", ValueError, "candidates: wanted at least 4 rows.* got 3",
              lambda: fastsim.info_nce(X, Y[:3])),
        wrong("fewer positives", ValueError, "positives: wanted at least 4 rows.* got 3",
              lambda: fastsim.full_triplet(X, Y[:3])),
        wrong("positives range", ValueError, r"positives: wanted values in \[0, 4\), got 0 to 9",
              lambda: fastsim.info_nce(X, Y, torch.tensor([0, 1, 2, 9]))),
        wrong("positives count", ValueError, "positives: wanted 4 entries, got 2",
              lambda: fastsim.info_nce(X, Y, torch.tensor([0, 1]))),
        wrong("positives dtype", TypeError, "positives: wanted integers, got torch.float32",
              lambda: fastsim.info_nce(X, Y, torch.rand(4))),
        wrong("guide device", ValueError, r"guide\[0\]: wanted device cpu, .* got meta",
              lambda: fastsim.info_nce(X, Y, guide=(X.to("meta"), Y.to("meta")))),
        wrong("temperature 0", ValueError, "temperature: wanted a positive .* got 0",
              lambda: fastsim.info_nce(X, Y, temperature=0)),
        wrong("temperature tiny", ValueError, "temperature: .* number from .* got 1e-39",
              lambda: fastsim.info_nce(X, Y, temperature=1e-39)),
        wrong("temperature tensor", ValueError, "temperature: wanted a positive .* got -1",
              lambda: fastsim.info_nce(X, Y, temperature=torch.tensor(-1.0))),
        wrong("temperature vector", ValueError, "temperature: wanted a number or a floating",
              lambda: fastsim.info_nce(X, Y, temperature=torch.ones(2))),
        wrong("temperature text", TypeError, "temperature: wanted a number .* got str",
              lambda: fastsim.info_nce(X, Y, temperature="hot")),
        wrong("temperature nan", ValueError, "temperature: wanted a positive .* got nan",
              lambda: fastsim.sup_con(X, GROUPS, temperature=float("nan"))),
        wrong("scale", ValueError, "scale: wanted a positive .* got -2",
              lambda: fastsim.cosent(SCORES, GROUPS, scale=-2)),
        wrong("siglip scale", ValueError, "scale: wanted a finite number, got inf",
              lambda: fastsim.siglip(X, Y, scale=float("inf"))),
        wrong("margin tensor", TypeError, "margin: wanted a number, got Tensor",
              lambda: fastsim.info_nce(X, Y, margin=torch.tensor(0.1))),
        wrong("learnt margin", TypeError, "margin: wanted a number, got Tensor",
              lambda: losses.batch_all_triplet(X, GROUPS, margin=torch.tensor(1.0))),
        wrong("alpha", TypeError, "alpha: wanted a number, got Tensor",
              lambda: fastsim.multi_similarity(X, GROUPS, alpha=torch.tensor(2.0))),
        wrong("exclude_above", ValueError, "exclude_above: wanted at least 0, or None, got -1",
              lambda: fastsim.info_nce(X, Y, exclude_above=-1)),
        wrong("margin", TypeError, "margin: wanted a number",
              lambda: fastsim.info_nce(X, Y, margin="wide")),
        wrong("prior nan", ValueError, r"tau_plus: wanted values in \[0, 1\), got nan to nan",
              lambda: fastsim.debiased_contrastive(X, Y, tau_plus=torch.full((4,), torch.nan))),
        wrong("flag tensor", ValueError, r"symmetric: wanted one of False, True, got tensor\(",
              lambda: fastsim.info_nce(X, Y, symmetric=torch.tensor([True, False]))),
        wrong("similarity", ValueError, "similarity: wanted one of 'cosine', 'dot', got 'l2'",
              lambda: fastsim.sup_con(X, GROUPS, similarity="l2")),
        wrong("bias count", ValueError, "candidate_bias: wanted 4 numbers.* got 3",
              lambda: fastsim.info_nce(X, Y, candidate_bias=torch.zeros(3))),
        wrong("bias integers", TypeError, "candidate_bias: wanted floating-point .*torch.int64",
              lambda: fastsim.info_nce(X, Y, candidate_bias=GROUPS)),
        wrong("bias infinite", ValueError, "candidate_bias: wanted finite .* -inf .*exclude",
              lambda: fastsim.info_nce(X, Y, candidate_bias=torch.zeros(4).log())),
        wrong("bias gradient", ValueError, "candidate_bias: wanted .* without a gradient",
              lambda: fastsim.info_nce(X, Y, candidate_bias=torch.zeros(4, requires_grad=True))),
        wrong("reduction", ValueError, "reduction: wanted one of 'mean', .* got 'avg'",
              lambda: fastsim.siglip(X, Y, reduction="avg")),
        wrong("mining", ValueError, "mining: wanted one of 'semi-hard', .* got 'soft'",
              lambda: fastsim.full_triplet(X, Y, mining="soft")),
        wrong("backend", ValueError, "backend: wanted one of 'auto', .* got 'cuda13'",
              lambda: fastsim.info_nce(X, Y, backend="cuda13")),
        wrong("backends", ValueError, r"backend: wanted one of 'auto', .* got \['eager'\]",
              lambda: fastsim.info_nce(X, Y, backend=["eager"])),
        wrong("empty", ValueError, r"anchors: wanted at least one element, got shape \(0, 6\)",
              lambda: fastsim.info_nce(X[:0], Y[:0])),
        wrong("no width", ValueError, r"x: wanted at least one element, got shape \(4, 0\)",
              lambda: fastsim.cosine_similarity(X[:, :0])),
        wrong("integers", TypeError, "anchors: wanted floating-point .* got torch.int64",
              lambda: fastsim.info_nce(X.long(), Y)),
        wrong("dtypes", TypeError, "candidates: wanted torch.float32, that of anchors, got .*64",
              lambda: fastsim.info_nce(X, Y.double())),
        wrong("one dimension", ValueError, r"x: wanted 2 dimension.* got shape \(6,\)",
              lambda: fastsim.siglip(X[0], Y)),
        wrong("not a tensor", TypeError, "anchors: wanted a torch.Tensor, got list",
              lambda: fastsim.info_nce([[1.0]], Y)),
        wrong("labels count", ValueError, "labels: wanted 4 entries.* got 3",
              lambda: fastsim.cosent(SCORES, GROUPS[:3])),
        wrong("labels nan", ValueError, "labels: .* got NaN",
              lambda: fastsim.cosent(SCORES, torch.tensor([0, 1, float("nan"), 1]))),
        wrong("labels complex", TypeError, "labels: wanted real or integer labels",
              lambda: fastsim.cosent(SCORES, torch.zeros(4, dtype=torch.complex64))),
        wrong("regression labels", ValueError, "labels: wanted 4 entries.* got 2",
              lambda: fastsim.cosine_regression(X, Y, torch.rand(2))),
        wrong("targets shape", ValueError, r"targets: wanted shape \(4, 4\).* got \(4, 3\)",
              lambda: fastsim.matrix_mse(X, Y, torch.rand(4, 3))),
        wrong("targets bool", TypeError, "targets: wanted a real or integer matrix, got torch.bool",
              lambda: fastsim.siglip(X, Y, torch.ones(4, 4, dtype=torch.bool))),
        wrong("positive weight", ValueError, "positive_weight: wanted one of .* got 'column'",
              lambda: fastsim.siglip(X, Y, (GROUPS, GROUPS), positive_weight="column")),
        wrong("positive weight of a matrix", ValueError,
              "positive_weight: wanted 'one' with a matrix of targets, got 'both'",
              lambda: fastsim.siglip(X, Y, torch.ones(4, 4), positive_weight="both")),
        wrong("targets gradient", ValueError, "targets: .* without a gradient.* requires_grad",
              lambda: fastsim.siglip(X, Y, torch.zeros(4, 4, requires_grad=True))),
        wrong("targets nan", ValueError, "targets: .* got NaN",
              lambda: fastsim.cosent_matrix(X, Y, torch.full((4, 4), float("nan")))),
        wrong("targets one", TypeError, r"targets: wanted \(row_groups, column_groups\)",
              lambda: fastsim.siglip(X, Y, (GROUPS,))),
        wrong("groups count", ValueError, r"targets\[1\]: wanted 4 entries, got 2",
              lambda: fastsim.siglip(X, Y, (GROUPS, GROUPS[:2]))),
        wrong("exclude", TypeError,
              r"exclude: wanted \(row_ids, column_ids\), got Tensor of shape \(\d+,\)$",
              lambda: fastsim.info_nce(X, Y, exclude=GROUPS)),
        wrong("exclude dtype", TypeError, r"exclude\[0\]: wanted integers",
              lambda: fastsim.info_nce(X, Y, exclude=(SCORES, GROUPS))),
        wrong("sup_con groups", ValueError, "groups: wanted 4 entries, got 3",
              lambda: fastsim.sup_con(X, GROUPS[:3])),
        wrong("paired rows", ValueError, "y: wanted 4 rows, as many as x, got 3",
              lambda: fastsim.paired_cosine_similarity(X, Y[:3])),
        wrong("regression rows", ValueError, "v: wanted 4 rows, as many as u, got 3",
              lambda: fastsim.cosine_regression(X, Y[:3], SCORES)),
        wrong("triplet rows", ValueError, "negatives: wanted 4 rows, as many as anchors, got 2",
              lambda: fastsim.triplet_margin(X, Y, Y[:2])),
        wrong("odd width", ValueError, "u: wanted an even width .* got 5",
              lambda: fastsim.angle_similarity(X[:, :5], Y[:, :5])),
        wrong("k", ValueError, r"k: wanted 1 to 4 .* got 5", lambda: fastsim.top_k(X, Y, 5)),
        wrong("k type", TypeError, "k: wanted an int, got float",
              lambda: fastsim.top_k(X, Y, 2.0)),
        wrong("classes", ValueError, r"labels: wanted values in \[0, 3\), got 0 to 7",
              lambda: losses.SoftmaxClassification(6, 3)(X, Y, torch.tensor([0, 1, 2, 7]))),
        wrong("classifier width", ValueError, "u: wanted width 5, which is dim, got 6",
              lambda: losses.SoftmaxClassification(5, 3)(X, Y, GROUPS)),
        wrong("classifier labels", ValueError, "num_labels: wanted a positive int, got 0",
              lambda: losses.SoftmaxClassification(5, 0)),
        *(
            wrong(f"directions {given}", TypeError, "directions: wanted a tuple of names, got ",
                  lambda given=given: fastsim.info_nce(X, Y, directions=given))
            for given in (5, None, "query_to_doc")
        ),
        *(
            wrong(f"{loss.__name__} {given}", ValueError, "largest_group: wanted a positive int",
                  lambda loss=loss, given=given: loss(X, GROUPS, largest_group=given))
            for loss in (losses.batch_all_triplet, losses.batch_semi_hard_triplet)
            for given in (1.5, 0, True)
        ),
        wrong("module option", TypeError, "InfoNCE.* unexpected keyword argument 'tau'",
              lambda: losses.InfoNCE(tau=1)),
    ],
)  # fmt: skip
def test_wrong_argument(call, kind, pattern):
    with pytest.raises(kind, match=pattern):
        call()


# Numbers that a loss multiplies or divides by, and what else it is given.
NUMBERS = {
    fastsim.info_nce: ((X, Y), ("temperature", "margin")),
    fastsim.late_interaction: ((X[:, None], Y[:, None]), ("temperature",)),
    fastsim.late_interaction_distillation: (
        (X[:, None], Y[:, None], torch.zeros(len(X), len(Y))),
        ("temperature", "teacher_temperature"),
    ),
    fastsim.distill: ((X, Y, X, Y), ("temperature", "teacher_temperature")),
    fastsim.siglip: ((X, Y), ("scale", "bias")),
    fastsim.multi_similarity: ((X, GROUPS), ("alpha", "beta", "base")),
    fastsim.circle: ((X, GROUPS), ("gamma", "margin")),
    fastsim.cosent: ((SCORES, GROUPS), ("scale",)),
    fastsim.cosent_matrix: ((X, Y, None), ("scale",)),
    fastsim.full_triplet: ((X, Y), ("margin",)),
}


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, float("nan")], ids=str)
@pytest.mark.parametrize(
    ("loss", "name"), [(loss, name) for loss, (_, names) in NUMBERS.items() for name in names]
)
def test_a_number_that_float32_cannot_hold(loss, name, value):
    with pytest.raises(ValueError, match=f"^{name}: wanted a .*number"):
        loss(*NUMBERS[loss][0], **{name: value})


@pytest.mark.parametrize(
    ("loss", "name"),
    [(loss, name) for loss, (_, names) in NUMBERS.items() for name in names if "temp" in name],
)
def test_a_temperature_whose_inverse_float32_cannot_hold(loss, name):
    with pytest.raises(ValueError, match=f"^{name}: wanted a positive number from 2.9e-39"):
        loss(*NUMBERS[loss][0], **{name: 1e-40})


@pytest.mark.parametrize("backend", [n for n in fastsim.backends() if n not in ("torch", "eager")])
def test_a_backend_that_cannot_serve_is_refused_with_every_reason(backend):
    meta = torch.empty(4, 6, device="meta")
    with pytest.raises(RuntimeError, match=f"backend '{backend}' cannot be used: .*eager: usable"):
        fastsim.info_nce(meta, meta.clone(), backend=backend)
