"""What GradCache takes for a column, and what beside the encoder gets a gradient."""

import pytest
import torch

import fastsim
from fastsim.grad_cache import GradCache, MicroBatches, _work
from tests.distributed.layers import WIDTH, encoder

ROWS = 7


def rows():
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def loss_of(vectors):
    return fastsim.sup_con(vectors, torch.arange(ROWS) // 2)


def test_mappings_within_a_mapping_are_cut_too():
    """As the inputs of a model of texts and images, whose parts have names of their own."""
    encode, one, other, sizes = encoder(dropout=0.0), rows(), rows(), []

    def both(part):
        given = part["text"]
        sizes.append((len(given["ids"]), len(part["image"]), given["kind"], given["names"]))
        return encode(part["text"]["ids"] + part["image"].mean(0))

    names, kind = list("abcdefg"), tuple("abcdefg")  # examples, a setting
    column = {"text": {"ids": one, "kind": kind, "names": names}, "image": other}
    GradCache(both, loss_of, micro_batch_size=4).backward(column)
    assert sizes == [(4, 4, kind, names[:4]), (3, 3, kind, names[4:])] * 2
    found = [p.grad.clone() for p in encode.parameters()]
    encode.zero_grad()
    parts = [slice(0, 4), slice(4, 7)]
    loss_of(torch.cat([encode(one[part] + other[part].mean(0)) for part in parts])).backward()
    for gradient, parameter in zip(found, encode.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("column", "kind", "said"),
    [
        (
            {"text": {"ids": torch.ones(4, 2)}, "image": torch.ones(5, 2)},
            ValueError,
            r"columns\[0\]: wanted tensors and lists of equally many rows, got \[4, 5\]",
        ),
        (
            {"ids": torch.ones(4, 2), "names": ["a", "b"]},
            ValueError,
            r"columns\[0\]: wanted tensors and lists of equally many rows, got \[2, 4\]",
        ),
        ({"kind": "a"}, ValueError, r"columns\[0\]: wanted tensors and lists .*, got none"),
        (
            {"text": {"ids": torch.tensor(1.0)}},
            ValueError,
            r"columns\[0\]: wanted tensors \(N, ...\), got a tensor of one number",
        ),
        (
            (torch.ones(4, 2), torch.ones(4, 2)),  # which would be two examples, encoded at once
            TypeError,
            r"columns\[0\]: wanted .* a list, got tuple of tensors: parts of the rows go into a",
        ),
    ],
)
def test_what_has_no_rows_to_be_told_from_is_refused(column, kind, said):
    with pytest.raises(kind, match=said):
        GradCache(encoder(), loss_of, micro_batch_size=1).backward(column)


@pytest.mark.parametrize("column", [torch.ones(0, 3), {"ids": torch.ones(0, 3)}, []])
def test_a_process_without_rows_has_a_micro_batch_without_rows(column):
    (part,) = MicroBatches.of(column, 2, empty=True)
    assert len(part["ids"] if isinstance(part, dict) else part) == 0
    with pytest.raises(ValueError, match="column: wanted at least one row, got 0"):
        MicroBatches.of(column, 2)


@pytest.mark.parametrize("part", [("ids", "mask"), {"ids": [1, 2]}, torch.ones(3, 2), object()])
def test_a_process_with_fewer_micro_batches_encodes_one_that_it_has(part):
    """Whatever it is: its first row, taken out of it, may be no input of the encoder."""
    work = _work([len], [MicroBatches([part])], [3])
    assert [used for *_, used in work] == [True, False, False]
    assert all(given is part for _, given, *_ in work)


def test_what_a_function_learns_gets_its_gradient():
    """A temperature and a layer that the loss holds without being a module, a weight of it."""
    encode, head = encoder(dropout=0.0), torch.nn.Linear(10, 4, dtype=torch.float64)
    temperature = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    weight = torch.nn.Parameter(torch.tensor(1.7, dtype=torch.float64))
    learnt = [temperature, weight, *head.parameters(), *encode.parameters()]
    columns = rows(), rows()

    def loss(x, y):
        return fastsim.info_nce(head(x), head(y), temperature=temperature)

    def weighed(value):
        return weight * value

    weighed(loss(*map(encode, columns))).backward()
    wanted = [p.grad for p in learnt]
    for parameter in learnt:
        parameter.grad = None
    GradCache(encode, loss, micro_batch_size=3).backward(*columns, scale=weighed)
    for parameter, gradient in zip(learnt, wanted, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_loss_may_hold_weights_of_the_encoder():
    """They get both gradients: of the loss, and through the embeddings."""
    encode, column = encoder(dropout=0.0), rows()
    weights = list(encode.parameters())

    def loss(vectors):
        return loss_of(vectors) + sum(p.square().sum() for p in weights)

    loss(encode(column)).backward()
    wanted = [p.grad.clone() for p in weights]
    encode.zero_grad()
    GradCache(encode, loss, micro_batch_size=3).backward(column)
    for parameter, gradient in zip(weights, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
