"""GradCache against the plain step: the same micro-batches with all their graphs kept."""

import weakref

import pytest
import torch

import fastsim
from fastsim import losses
from fastsim.grad_cache import GradCache, MicroBatches
from tests.distributed.layers import WIDTH, encoder


def plain(encode, loss, columns, size, scale=None):
    """The step that holds every graph, in the order in which GradCache draws."""
    vectors = [torch.cat([encode(part) for part in MicroBatches.of(c, size)]) for c in columns]
    value = loss(*vectors)
    (value if scale is None else scale(value)).backward()
    return value.detach()


def gradients(*modules):
    found = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def parameter(value):
    return torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))


def ids(count):
    return torch.arange(count) // 2


class Two(torch.nn.Module):
    """A loss of x and y with further arguments."""

    def __init__(self, loss, *arguments, **options):
        super().__init__()
        self.loss, self.arguments, self.options = loss, arguments, options

    def forward(self, *vectors):
        return self.loss(*vectors, *self.arguments, **self.options)


# name -> (loss of two columns, rows of the columns)
CASES = {
    "info_nce": (lambda: losses.InfoNCE(temperature=parameter(0.2)), (14, 23)),
    "info_nce symmetric": (lambda: losses.InfoNCE(symmetric=True), (14, 14)),
    "full_triplet": (lambda: losses.FullTriplet(mining="hard"), (14, 23)),
    "cosent_matrix": (
        lambda: Two(losses.CoSENTMatrix(scale=parameter(5.0)), (ids(14), ids(23))),
        (14, 23),
    ),
    "siglip": (lambda: losses.SigLIP(scale=parameter(3.0), bias=parameter(-1.0)), (14, 14)),
    "angle": (lambda: Two(losses.Angle(), torch.arange(9)), (9, 9)),
    "triplet_margin": (lambda: losses.TripletMargin(), (9, 9, 9)),
    "sup_con": (lambda: Two(losses.SupCon(), ids(9)), (9,)),
}


@pytest.mark.parametrize("size", [1, 4, 30])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_step(name, size):
    make, counts = CASES[name]
    encode, loss = encoder(), make()
    columns = [torch.randn(n, WIDTH, dtype=torch.float64) for n in counts]
    state = torch.get_rng_state()
    wanted = plain(encode, loss, columns, size)
    expected = gradients(encode, loss)
    assert all(g is not None and g.abs().max() > 0 for g in expected)
    torch.set_rng_state(state)
    value = GradCache(encode, loss, micro_batch_size=size).backward(*columns)
    after = torch.get_rng_state()
    assert not value.requires_grad  # it would hold the embeddings
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    for got, want in zip(gradients(encode, loss), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    # The generator goes on as after one pass, so later draws are those of the plain step.
    torch.set_rng_state(state)
    plain(encode, loss, columns, size)
    assert torch.equal(torch.get_rng_state(), after)


def test_autocast_and_gradient_scaling():
    encode, loss = (
        encoder(torch.float32),
        losses.InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.2))),
    )
    columns = [torch.randn(14, WIDTH), torch.randn(14, WIDTH)]
    state = torch.get_rng_state()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for step in ("plain", "cache"):
        torch.set_rng_state(state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if step == "plain":
                value = plain(encode, loss, columns, 4, scaler.scale)
            else:
                cache = GradCache(encode, loss, micro_batch_size=4)
                value = cache.backward(*columns, scale=scaler.scale)
        found.append([value, *gradients(encode, loss)])
    # Where a bfloat16 gradient is rounded differs: each micro-batch adds to float32 weights.
    assert found[0][0] == found[1][0]
    for one, two in zip(*found, strict=True):
        assert one.abs().max() > 0
        assert (one - two).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * one.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_of_the_16_bits_that_autocast_does_not_have(dtype):
    """A CPU refuses to join them there. Autocast casts nothing of this encoder."""
    other = ({torch.float16, torch.bfloat16} - {dtype}).pop()
    weight = torch.nn.Parameter(torch.randn(WIDTH).to(dtype))
    columns = [torch.randn(14, WIDTH).to(dtype) for _ in range(2)]
    found = []
    for enabled in (False, True):
        cache = GradCache(lambda x: x * weight, losses.InfoNCE(), micro_batch_size=4)
        with torch.autocast("cpu", other, enabled=enabled):
            found.append((cache.backward(*columns), weight.grad))
        weight.grad = None
    assert all(map(torch.equal, *found))


def test_one_encoder_per_column_and_lists_of_examples():
    table = torch.nn.Embedding(40, WIDTH, dtype=torch.float64)
    image, loss = encoder(), losses.InfoNCE(symmetric=True)

    def text(words):
        return torch.stack([table(torch.tensor(word)).mean(0) for word in words])[:, :10]

    pictures = {"pixels": torch.randn(7, WIDTH, dtype=torch.float64), "size": 3}
    words = [torch.randint(0, 40, (1 + n % 3,)).tolist() for n in range(7)]
    state = torch.get_rng_state()
    loss(
        torch.cat([image(pictures["pixels"][:4]), image(pictures["pixels"][4:])]), text(words)
    ).backward()
    expected = gradients(image, table)
    torch.set_rng_state(state)
    both = [lambda part: image(part["pixels"]), text]
    GradCache(both, loss, micro_batch_size=4).backward(pictures, words)
    for got, want in zip(gradients(image, table), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_columns_that_are_cut_already():
    """In parts of other sizes than those of GradCache, as texts by their lengths."""
    encode, column = encoder(dropout=0.0), torch.randn(9, WIDTH, dtype=torch.float64)
    ways = column, MicroBatches(column.split([5, 1, 3]))
    cache = GradCache(encode, Two(losses.NTXent(), ids(9)), micro_batch_size=2)
    found = [[cache.backward(way), *gradients(encode)] for way in ways]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("last", [False, True])
def test_a_frozen_encoder_beside_one_that_learns(last):
    """As an image encoder that is kept while the one of its captions is trained."""
    frozen, learns = encoder().requires_grad_(False), encoder(dropout=0.0)
    encoders = (learns, frozen.eval()) if last else (frozen.eval(), learns)
    columns = [torch.randn(9, WIDTH, dtype=torch.float64) for _ in encoders]
    loss = losses.InfoNCE()
    pairs = zip(encoders, columns, strict=True)
    loss(*(encode(column) for encode, column in pairs)).backward()
    expected = gradients(learns)
    GradCache(encoders, loss, micro_batch_size=4).backward(*columns)
    for got, want in zip(gradients(learns), expected, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="encode: wanted embeddings with a gradient, got none"):
        GradCache(frozen, loss, micro_batch_size=4).backward(*columns)


class OfTwo(losses.InfoNCE):
    def forward(self, x, y, left_out):
        return super().forward(x, y)


def test_a_loss_with_a_frozen_number_and_a_column_it_leaves_out():
    encode, loss = encoder(), OfTwo(temperature=parameter(0.2).requires_grad_(False))
    columns = [torch.randn(9, WIDTH, dtype=torch.float64) for _ in range(3)]
    state = torch.get_rng_state()
    plain(encode, loss, columns, 4)
    expected = gradients(encode)
    torch.set_rng_state(state)
    value = GradCache(encode, loss, micro_batch_size=4).backward(*columns)
    assert not value.requires_grad  # which would keep the graph of the loss
    for got, want in zip(gradients(encode), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert loss.temperature.grad is None


def peak_of_graphs(rows, size):
    """Most bytes that graphs of the encoder hold at a time."""
    alive, most = {}, 0

    def keep(tensor):
        nonlocal most
        of_input = tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if not of_input and tensor.data_ptr() not in alive:
            alive[tensor.data_ptr()] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, tensor.data_ptr(), None)
        most = max(most, sum(alive.values()))
        return tensor

    encode = encoder(torch.float32)
    x = torch.randn(rows, WIDTH)

    def watched(part):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return encode(part)

    GradCache(watched, lambda x, y: fastsim.info_nce(x, y), micro_batch_size=size).backward(x, x)
    return most


def test_memory_grows_with_the_micro_batch_and_not_the_batch():
    small, wide = peak_of_graphs(256, 16), peak_of_graphs(256, 64)
    weights = sum(p.nbytes for p in encoder(torch.float32).parameters())
    assert peak_of_graphs(1024, 16) <= small + weights
    assert wide > 2 * small


ROWS = torch.ones(4, WIDTH, dtype=torch.float64)
UNEVEN = {"a": torch.ones(4, WIDTH), "b": torch.ones(5, WIDTH)}


@pytest.mark.parametrize(
    ("call", "kind", "pattern"),
    [
        (
            lambda e, f: GradCache(e, f, micro_batch_size=0),
            ValueError,
            "micro_batch_size: wanted at",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2.0),
            TypeError,
            "micro_batch_size: .* float",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=True),
            TypeError,
            "micro_batch_size: .* bool",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(),
            ValueError,
            "columns: .* got 0",
        ),
        (
            lambda e, f: GradCache([e, e], f, micro_batch_size=2).backward([1]),
            ValueError,
            "columns: wanted 2, one per encoder, got 1",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(torch.empty(0, 3)),
            ValueError,
            r"columns\[0\]: wanted at least one row, got 0",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(UNEVEN),
            ValueError,
            r"columns\[0\]: wanted tensors and lists of equally many rows, got \[4, 5\]",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(3),
            TypeError,
            r"columns\[0\]: wanted a tensor, .* got int",
        ),
        (
            lambda e, f: GradCache(len, f, micro_batch_size=2).backward([1, 2]),
            TypeError,
            "encode: wanted floating-point embeddings, got int",
        ),
        (
            lambda e, f: GradCache(torch.clone, f, micro_batch_size=2).backward(ids(4)),
            TypeError,
            "encode: wanted floating-point embeddings, got torch.int64",
        ),
        (
            lambda e, f: GradCache(lambda x: x.to("meta"), f, micro_batch_size=2).backward(ROWS),
            ValueError,
            "encode: wanted embeddings on a device whose random state .*, got meta",
        ),
        (
            lambda e, f: GradCache(e, lambda x: x.sum(1), micro_batch_size=2).backward(ROWS),
            ValueError,
            r"loss: wanted one number, got shape \(4,\)",
        ),
        (
            lambda e, f: GradCache(e, lambda x: 1.0, micro_batch_size=2).backward(ROWS),
            TypeError,
            "loss: wanted a tensor of one number, got float",
        ),
        (
            lambda e, f: GradCache(e, lambda x: x.detach().sum(), micro_batch_size=2).backward(
                ROWS
            ),
            ValueError,
            "loss: wanted a number with a gradient, got one without",
        ),
        (
            lambda e, f: GradCache(e, torch.sum, micro_batch_size=2).backward(
                ROWS, scale=lambda loss: loss.repeat(2)
            ),
            ValueError,
            r"scale: wanted one number, got shape \(2,\)",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(ROWS, scale=2.0),
            TypeError,
            "scale: wanted a function, got float",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(torch.tensor(1.0), ROWS),
            ValueError,
            r"columns\[0\]: wanted tensors \(N, ...\), got a tensor of one number",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward({"a": torch.tensor(1.0)}),
            ValueError,
            r"columns\[0\]: wanted tensors \(N, ...\), got a tensor of one number",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2).backward(MicroBatches()),
            ValueError,
            r"columns\[0\]: wanted at least one micro-batch, got none",
        ),
        (lambda e, f: MicroBatches.of(ROWS, 0), ValueError, "size: wanted at least 1, got 0"),
        (
            lambda e, f: GradCache(torch.sum, f, micro_batch_size=2).backward(ROWS),
            ValueError,
            r"encode: wanted embeddings \(n, D\), got one number",
        ),
        (
            lambda e, f: GradCache(torch.Tensor.t, f, micro_batch_size=3).backward(ROWS),
            ValueError,
            r"encode: wanted .* one width for columns\[0\], got .* rows \(1,\) and \(3,\)",
        ),
        (
            lambda e, f: GradCache(3, f, micro_batch_size=2),
            TypeError,
            "encode: wanted a function, got int",
        ),
        (
            lambda e, f: GradCache([], f, micro_batch_size=2),
            ValueError,
            "encode: wanted at least one function, got an empty list",
        ),
        (
            lambda e, f: GradCache(e, None, micro_batch_size=2),
            TypeError,
            "loss: wanted a function, got NoneType",
        ),
        (
            lambda e, f: GradCache(e, f, micro_batch_size=2, module="x"),
            TypeError,
            "module: wanted a torch.nn.Module, got str",
        ),
    ],
)
def test_wrong_argument(call, kind, pattern):
    with pytest.raises(kind, match=pattern):
        call(encoder(), losses.InfoNCE())
