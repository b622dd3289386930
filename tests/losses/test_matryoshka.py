"""Matryoshka: the sum of the loss over slices of the embeddings."""

import pytest
import torch

import fastsim
from fastsim import losses


def sides(count=2, rows=9, width=12):
    return [torch.randn(rows, width, dtype=torch.float64, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("loss_options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "eager"])
def test_the_sum_over_widths(backend, loss_options, usable):
    """Of every term of the loss, with the gradient of a learnt temperature."""
    usable(backend)
    x, y = sides()
    temperature = torch.nn.Parameter(torch.tensor(0.2, dtype=torch.float64))
    options = loss_options | {"temperature": temperature}
    loss = losses.Matryoshka(
        losses.InfoNCE(**options, backend=backend), [12, 5, 3], [1.0, 0.5, 2.0]
    )
    ids = torch.arange(9) // 2
    excluded = {} if loss_options else {"exclude": (ids, ids)}  # smoothing takes no exclusion
    got = loss(x, y, **excluded)
    wanted = sum(
        weight * fastsim.info_nce(x[:, :w], y[:, :w], **options, **excluded, backend="eager")
        for w, weight in ((12, 1.0), (5, 0.5), (3, 2.0))
    )
    torch.testing.assert_close(got, wanted)
    inputs = (x, y, temperature)
    for mine, one in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        torch.testing.assert_close(mine, one)
    assert list(loss.parameters()) == [temperature]


def test_other_arguments_stay_whole():
    (x,) = sides(1)
    groups = torch.arange(9) // 2
    targets = torch.rand(9, 9, dtype=torch.float64)
    for loss, arguments in (
        (losses.SupCon(), (x, groups)),
        (losses.SigLIP(), (x, x, targets)),  # as wide as the embeddings' rows are many
        (losses.TripletMargin(), tuple(sides(3))),
        (losses.CoSENTMatrix(), (x, None, (groups, groups))),
    ):
        cut = [a[:, :4] if a is not None and torch.is_tensor(a) and a.dim() == 2 else a
               for a in arguments]  # fmt: skip
        if loss.function is fastsim.siglip:
            cut[2] = targets
        torch.testing.assert_close(losses.Matryoshka(loss, [4])(*arguments), loss(*cut))


def test_tokens_are_cut_too():
    queries = torch.randn(4, 3, 8, dtype=torch.float64)
    documents = torch.randn(6, 5, 8, dtype=torch.float64)
    got = losses.Matryoshka(losses.LateInteraction(), [8, 4])(queries, documents)
    wanted = [fastsim.late_interaction(queries[..., :w], documents[..., :w]) for w in (8, 4)]
    torch.testing.assert_close(got, sum(wanted))


def test_embeddings_by_name():
    x, y = sides()
    groups, others = torch.arange(9) // 2, torch.arange(9) // 3
    targets = torch.rand(9, 9, dtype=torch.float64)
    of_groups = {"reference_groups": others}
    for loss, places, embeddings, rest in (
        (losses.InfoNCE(), (), {"anchors": x, "candidates": y}, {}),
        (losses.SupCon(), (x, groups), {"references": y}, of_groups),
        (losses.SigLIP(), (x,), {"y": y}, {"targets": targets}),
    ):
        got = losses.Matryoshka(loss, [4])(*places, **embeddings, **rest)
        short = {name: value[:, :4] for name, value in embeddings.items()}
        wanted = loss(*(x[:, :4] if value is x else value for value in places), **short, **rest)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("widths", "weights", "said"),
    [
        ([], None, "widths: wanted at least one"),
        ([3, 3], None, "widths: .* all different"),
        ([0], None, r"widths\[0\]: wanted a positive int, got 0"),
        ([2.0], None, r"widths\[0\]: wanted a positive int, got 2.0"),
        ([3, 2], [1], "weights: wanted 2, one per width, got 1"),
        ([3, 2], [1, float("nan")], r"weights\[1\]: wanted a finite number, got nan"),
    ],
)
def test_wrong_widths(widths, weights, said):
    with pytest.raises(ValueError, match=said):
        losses.Matryoshka(losses.InfoNCE(), widths, weights)


def test_a_teacher_keeps_its_width():
    x, y, teacher_x, teacher_y = (torch.randn(6, width) for width in (8, 8, 3, 3))
    scores = torch.randn(6, 6)
    queries, documents = torch.randn(2, 3, 8), torch.randn(2, 5, 4, 8)
    for loss, student, teacher in (
        (losses.Distill(), (x, y), (teacher_x, teacher_y)),
        (losses.Distill(), (x, y), (scores,)),
        (losses.LateInteractionDistillation(), (queries, documents), (torch.randn(2, 5),)),
        (losses.LateInteractionDistillation(), (queries, documents[0]), (torch.randn(2, 5),)),
    ):
        got = losses.Matryoshka(loss, [4, 7])(*student, *teacher)
        wanted = sum(loss(*(side[..., :w] for side in student), *teacher) for w in (4, 7))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0]])
@pytest.mark.parametrize("backend", ["cpu", "torch", "eager"])
def test_losses_of_rows_are_summed_by_row(backend, weights, usable):
    usable(backend)
    x, y = sides()
    groups = torch.arange(9) // 2
    for loss, rest in (
        (losses.InfoNCE(reduction="none", backend=backend), (y,)),
        (losses.SigLIP(reduction="none", backend=backend), (y,)),
        (losses.SupCon(reduction="none", backend=backend), (groups,)),
        (losses.FullTriplet(reduction="none", backend=backend), (y,)),
    ):
        got = losses.Matryoshka(loss, [8, 4], weights)(x, *rest)
        short = [[t[:, :w] if t is y else t for t in (x[:, :w], *rest)] for w in (8, 4)]
        terms = zip(weights or (1.0, 1.0), short, strict=True)
        wanted = sum(weight * loss(*given) for weight, given in terms)
        assert got.shape == (9,)
        torch.testing.assert_close(got, wanted)


def test_a_loss_that_cannot_be_called():
    with pytest.raises(TypeError, match="loss: wanted a loss module or a function, got 5"):
        losses.Matryoshka(5, widths=[4])


def test_widths_that_are_no_sequence():
    with pytest.raises(TypeError, match="widths: wanted a sequence of numbers, got int"):
        losses.Matryoshka(losses.InfoNCE(), 5)


def test_a_width_beyond_the_embeddings():
    with pytest.raises(ValueError, match="widths: wanted at most 12, got 13"):
        losses.Matryoshka(losses.InfoNCE(), [13])(*sides())
    with pytest.raises(TypeError, match="arguments: wanted embeddings"):
        losses.Matryoshka(losses.InfoNCE(), [3])(torch.arange(3))
