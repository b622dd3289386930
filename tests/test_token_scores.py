"""max_sim against loops in float64: layouts of the tokens, edges, gradients, bits."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import fastsim
from fastsim.engine import max_sim as engine
from fastsim.grad_cache import GradCache
from tests import oracles
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
QUERY_LENGTHS, DOCUMENT_LENGTHS, WIDTH = (3, 1, 5, 0), (7, 2, 0, 41, 9, 0), 19


@pytest.fixture(autouse=True)
def served(request, usable):
    """Leaves out the backends that are not here, or have no kernel of this kind."""
    backend = (
        request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else 0
    )
    if backend:
        usable(backend)
        reason = fastsim.backends()[backend] or engine.get(backend).unsupported_kind("max_sim")
        if reason:
            pytest.skip(reason)


def texts(lengths, dtype=torch.float64):
    return [torch.randn(n, WIDTH, dtype=torch.float64).to(dtype) for n in lengths]


def padded(parts):
    """(tokens (B, L, D) with noise for padding, mask (B, L))."""
    longest = max(map(len, parts)) + 1
    values = torch.full((len(parts), longest, WIDTH), float("nan"), dtype=parts[0].dtype)
    mask = torch.zeros(len(parts), longest, dtype=torch.bool)
    for i, part in enumerate(parts):
        places = torch.randperm(longest)[: len(part)].sort().values
        values[i, places], mask[i, places] = part, True
    return values, mask


def offsets(parts):
    return torch.tensor([0, *(sum(map(len, parts[: i + 1])) for i in range(len(parts)))])


def layouts(queries, documents):
    """The arguments of max_sim of the same texts: padded with masks, and with offsets."""
    (q, q_mask), (d, d_mask) = padded(queries), padded(documents)
    yield (q, d, q_mask, d_mask), {}
    given = {"query_offsets": offsets(queries), "document_offsets": offsets(documents)}
    yield (torch.cat(queries), torch.cat(documents)), given
    yield (q, torch.cat(documents), q_mask), {"document_offsets": given["document_offsets"]}
    yield (torch.cat(queries), d, None, d_mask), {"query_offsets": given["query_offsets"]}


def weighed(scores):
    """A number of all scores that are finite, each with a weight of its own."""
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).reshape(scores.shape)
    return (scores * weights)[scores.isfinite()].sum()


def differentiated(scores, leaves):
    grads = torch.autograd.grad(weighed(scores), leaves, materialize_grads=True)
    return scores.detach(), [g.detach() for g in grads]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(backend, dtype, similarity):
    options = {"similarity": similarity}
    queries, documents = texts(QUERY_LENGTHS, dtype), texts(DOCUMENT_LENGTHS, dtype)
    flat = [torch.cat(queries).double(), torch.cat(documents).double()]

    def split(sides):
        pairs = zip(sides, (QUERY_LENGTHS, DOCUMENT_LENGTHS), strict=True)
        return [list(side.split(lengths)) for side, lengths in pairs]

    def truth(sides):
        leaves = [side.clone().requires_grad_() for side in sides]
        scores, grads = differentiated(oracles.max_sim(*split(leaves), **options), leaves)
        return [scores.masked_fill(scores.isinf(), 0.0), *grads]

    wanted = truth(flat)
    compute = torch.promote_types(dtype, torch.float32)
    moved = [torch.finfo(compute).eps * move for move in conditioning(truth, flat)]
    dense = None
    for arguments, given in layouts(queries, documents):
        leaves = [a.clone().requires_grad_() for a in arguments[:2]]
        rest = arguments[2:]
        scores = fastsim.max_sim(*leaves, *rest, **given, **options, backend=backend)
        assert scores.dtype == compute
        empty = torch.tensor([n == 0 for n in DOCUMENT_LENGTHS])
        none = torch.tensor([n == 0 for n in QUERY_LENGTHS])
        assert (scores[none] == 0).all()
        assert (scores[~none][:, empty] == -torch.inf).all()
        scores, grads = differentiated(scores, leaves)
        scores = scores.masked_fill(scores.isinf(), 0.0)
        for place, (grad, mask) in enumerate(zip(grads, [*rest, None, None], strict=False)):
            if mask is not None:
                assert (grad[~mask] == 0).all()  # and not NaN, which the padding is
                grads[place] = grad[mask]
        found = [scores, *(g.reshape(-1, WIDTH) for g in grads)]
        if dense is None:
            sides = [side.to(compute).requires_grad_() for side in flat]
            of_sides = {"query_offsets": offsets(queries), "document_offsets": offsets(documents)}
            eager = fastsim.max_sim(*sides, **of_sides, **options, backend="eager")
            eager, eager_grads = differentiated(eager, sides)
            dense = [eager.masked_fill(eager.isinf(), 0.0), *eager_grads]
        kinds = (compute, dtype, dtype)
        parts = zip(found, wanted, dense, kinds, moved, strict=True)
        for name, (got, exact, formula, kind, move) in zip("sqd", parts, strict=True):
            assert_close(name, got, exact, formula, kind, moved=move)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_of_each_query(backend):
    queries = torch.randn(4, 3, WIDTH).requires_grad_()
    documents = torch.randn(4, 5, 6, WIDTH).requires_grad_()
    mask = torch.rand(4, 5, 6) < 0.7
    mask[..., 2] = True
    mask[1, 2] = False
    got = fastsim.max_sim(queries, documents, None, mask, backend=backend)
    every = fastsim.max_sim(queries, documents.flatten(0, 1), None, mask.flatten(0, 1))
    wanted = every.view(4, 4, 5)[torch.arange(4), torch.arange(4)]
    assert wanted[1, 2] == -torch.inf
    torch.testing.assert_close(got, wanted)
    both = [torch.autograd.grad(weighed(s), (queries, documents)) for s in (got, wanted)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_tokens_has_the_gradient(backend, ragged):
    token = torch.randint(-4, 5, (WIDTH,)).float()  # products without rounding, so that they tie
    other = -token
    documents = torch.stack([other, token, token, other, token])[None].requires_grad_()
    given = {"document_offsets": torch.tensor([0, 5])} if ragged else {}
    some = documents[0] if ragged else documents
    scores = fastsim.max_sim(token.view(1, 1, -1), some, **given, similarity="dot", backend=backend)
    (grad,) = torch.autograd.grad(scores.sum(), documents)
    wanted = torch.zeros_like(documents)
    wanted[0, 1] = token
    assert torch.equal(grad, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_one_number_a_column_apart(backend, dtype):
    """The only number of a row has any stride."""
    tokens = torch.randn(2, 12).to(dtype).T
    offsets = torch.arange(0, 13, 4)
    given = {"query_offsets": offsets, "document_offsets": offsets, "similarity": "dot"}
    found, plain = (
        fastsim.max_sim(x, x, **given, backend=backend)
        for x in (tokens[:, 1:], tokens[:, 1:].contiguous())
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_of_each_is_a_cosine(backend):
    x, y = torch.randn(6, WIDTH), torch.randn(7, WIDTH)
    got = fastsim.max_sim(x[:, None], y[:, None], backend=backend)
    torch.testing.assert_close(got, fastsim.cosine_similarity(x, y))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_reach_the_scores(backend, value, similarity):
    queries, documents = torch.randn(3, 4, WIDTH), torch.randn(5, 6, WIDTH)
    documents[1, 3, 2] = value
    queries[2, 1, 2] = value
    got = fastsim.max_sim(queries, documents, similarity=similarity, backend=backend)
    wrong = torch.zeros(3, 5, dtype=torch.bool)
    wrong[2] = True
    # An infinity times a negative number loses against the other tokens.
    wrong[:, 1] = (documents[1, 3, 2] * queries[:, :, 2] > 0).any(1) | torch.tensor(
        value != value or similarity == "cosine"
    )
    if similarity == "dot" and value == value:
        wrong[2] = (documents[:, :, 2] * queries[2, 1, 2] == queries[2, 1, 2]).any(1)
        wrong[2] |= (documents[:, :, 2] < 0).all(1)
        wrong[2, 1] = True
    assert torch.equal(~got.isfinite(), wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_documents_and_many_queries(backend, monkeypatch, small_panels):
    """More tokens than a panel of any backend has."""
    queries, documents = torch.randn(70, 9, 8), torch.randn(2, 4500, 8)
    sides = [side.requires_grad_() for side in (queries, documents)]
    got = differentiated(fastsim.max_sim(*sides, backend=backend), sides)
    wanted = differentiated(fastsim.max_sim(*sides, backend="eager"), sides)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_may_be_beyond_the_places_of_16_bits(backend):
    query = torch.ones(1, 1, 2)
    for place in ((1 << 15) - 1, 1 << 15, 1 << 16, 1 << 17):
        document = torch.zeros(1, place + 1, 2)
        document[0, -1, 0] = 1.0
        document.requires_grad_()
        scores = fastsim.max_sim(query, document, similarity="dot", backend=backend)
        (grad,) = torch.autograd.grad(scores.sum(), document)
        assert grad.any(2).nonzero().tolist() == [[0, place]]


CODE = """
import os, sys, torch, fastsim
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(int(os.environ["FASTSIM_SEED"]))
q, d = torch.randn(9, 7, 24), torch.randn(11, 50, 24)
out = []
for dtype in (torch.float32, torch.bfloat16):
    sides = [s.to(dtype).requires_grad_() for s in (q, d)]
    scores = fastsim.max_sim(*sides, None, torch.rand(11, 50) > 0.2, backend="cpu")
    out += [scores.detach(), *torch.autograd.grad(scores.sin().sum(), sides)]
torch.save(out, sys.argv[2])
"""


def test_the_same_bits_for_any_number_of_threads(usable, tmp_path):
    usable("cpu")
    found = []
    for threads in (1, 3):
        path = tmp_path / f"{threads}.pt"
        command = [sys.executable, "-c", CODE, str(threads), str(path)]
        subprocess.run(command, check=True, env=os.environ)
        found.append(torch.load(path))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
def test_opcheck_and_compile(backend, monkeypatch):
    queries, documents = texts((3, 1, 4), torch.float32), texts((2, 6, 5, 1), torch.float32)
    calls = []
    for name in ("_max_sim", "_max_sim_backward"):
        operator = getattr(engine, name)

        def record(*arguments, operator=operator):
            calls.append((operator.operator, arguments))
            return operator(*arguments)

        monkeypatch.setattr(engine, name, record)
    for arguments, given in layouts(queries, documents):
        leaves = [torch.nan_to_num(a).requires_grad_() for a in arguments[:2]]
        rest = arguments[2:]
        differentiated(fastsim.max_sim(*leaves, *rest, **given, backend=backend), leaves)
    assert len(calls) == 8
    for operator, arguments in calls:
        opcheck(operator, [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments])
    monkeypatch.undo()
    torch._dynamo.reset()
    compiled = torch.compile(fastsim.max_sim, fullgraph=True, backend="aot_eager")
    for arguments, given in list(layouts(queries, documents))[:2]:
        leaves = [torch.nan_to_num(a).requires_grad_() for a in arguments[:2]]
        results = [
            differentiated(call(*leaves, *arguments[2:], **given, backend=backend), leaves)
            for call in (compiled, fastsim.max_sim)
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("ragged", [False, True])
def test_nothing_waits_for_the_device(ragged):
    queries = torch.empty(12 if ragged else (3, 4, 6)[0], *((6,) if ragged else (4, 6)))
    documents = torch.empty(20, 6) if ragged else torch.empty(5, 4, 6)
    sides = [side.to("meta").requires_grad_() for side in (queries, documents)]
    given = {}
    if ragged:
        given = {
            "query_offsets": torch.empty(4, dtype=torch.int64, device="meta"),
            "document_offsets": torch.empty(6, dtype=torch.int64, device="meta"),
        }
    scores = fastsim.max_sim(*sides, **given, average=True, backend="torch")
    assert scores.shape == (3, 5)
    scores.sum().backward()


def test_the_gradient_cache(usable):
    """Micro-batches of equal lengths: the gradients of the whole batch at once."""
    usable("cpu")
    encode = torch.nn.Linear(5, 6)
    queries, documents = torch.randn(7, 3, 5), torch.randn(9, 4, 5)
    mask = torch.rand(9, 4) < 0.6
    mask[:, 0] = True

    def loss(q, d):
        return fastsim.late_interaction(q, d, None, mask, temperature=0.3)

    loss(encode(queries), encode(documents)).backward()
    wanted = [p.grad.clone() for p in encode.parameters()]
    encode.zero_grad()
    GradCache(encode, loss, micro_batch_size=2).backward(queries, documents)
    torch.testing.assert_close([p.grad for p in encode.parameters()], wanted)


Q, D = torch.randn(2, 3, 4), torch.randn(5, 6, 4)


@pytest.mark.parametrize(
    ("call", "kind", "pattern"),
    [
        (lambda: fastsim.max_sim(Q[0], D), ValueError, r"queries: wanted 3 dim.* \(3, 4\)"),
        (lambda: fastsim.max_sim(Q, D[..., :3]), ValueError, "documents: wanted width 4"),
        (lambda: fastsim.max_sim(Q, D.double()), TypeError, "documents: wanted torch.float32"),
        (
            lambda: fastsim.max_sim(Q, D, torch.ones(2, 3)),
            TypeError,
            "query_mask: wanted a bool tensor, got torch.float32",
        ),
        (
            lambda: fastsim.max_sim(Q, D, None, torch.ones(5, 5, dtype=torch.bool)),
            ValueError,
            r"document_mask: wanted shape \(5, 6\).* got \(5, 5\)",
        ),
        (
            lambda: fastsim.max_sim(Q, D[0], document_offsets=torch.tensor([0, 4, 3, 6])),
            ValueError,
            r"document_offsets: wanted numbers that rise from 0 to 6.* got \[0, 4, 3, 6\]",
        ),
        (
            lambda: fastsim.max_sim(Q, D[0], document_offsets=torch.tensor([0, 5])),
            ValueError,
            "document_offsets: wanted numbers that rise from 0 to 6",
        ),
        (
            lambda: fastsim.max_sim(Q, D[None]),
            ValueError,
            "documents: wanted those of 2 queries",
        ),
        (
            lambda: fastsim.max_sim(Q, D, similarity="euclidean"),
            ValueError,
            "similarity: wanted one of 'cosine', 'dot', got 'euclidean'",
        ),
        (
            lambda: fastsim.late_interaction(D, Q),
            ValueError,
            "documents: wanted at least 5, one per query, got 2",
        ),
        (
            lambda: fastsim.late_interaction(Q, D, None, torch.arange(5)[:, None] > torch.ones(6)),
            ValueError,
            "document_mask: wanted at least one token .* got none in document 0",
        ),
        (
            lambda: fastsim.late_interaction_distillation(Q, D, torch.randn(2, 4)),
            ValueError,
            r"teacher_scores: wanted shape \(2, 5\)",
        ),
        (
            lambda: fastsim.late_interaction_distillation(Q, D[:1], torch.randn(2, 1)),
            ValueError,
            "documents: wanted at least 2, got 1$",
        ),
        (
            lambda: fastsim.late_interaction_distillation(Q, D[:2, None], torch.randn(2, 1)),
            ValueError,
            "documents: wanted at least 2 of each query, got 1$",
        ),
    ],
)
def test_wrong_argument(call, kind, pattern):
    with pytest.raises(kind, match=pattern):
        call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_without_tokens_has_the_same_score_with_all(backend):
    queries = torch.randn(3, 4, WIDTH)
    documents = torch.randn(5, 6, WIDTH, requires_grad=True)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    queries[1] = torch.nan  # padding, so never read
    queries.requires_grad_()
    options = {"reduction": "none", "backend": backend}
    losses = fastsim.late_interaction(queries, documents, mask, **options)
    others = fastsim.late_interaction(
        queries[::2], documents, positives=torch.tensor([0, 2]), **options
    )
    torch.testing.assert_close(losses[::2], others)
    assert losses[1].item() == pytest.approx(math.log(5), rel=4 * torch.finfo(losses.dtype).eps)
    grads = torch.autograd.grad(losses[1], (queries, documents), retain_graph=True)
    assert not any(grad.any() for grad in grads)
    for grad in torch.autograd.grad(losses.sum(), (queries, documents)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_over_no_tokens_is_0(backend):
    queries, documents = torch.randn(2, 4, WIDTH), torch.randn(3, 5, WIDTH)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1] = False
    scores = fastsim.max_sim(queries, documents, mask, average=True, backend=backend)
    assert torch.equal(scores[1], torch.zeros(3))
    assert scores[0].ne(0).all()
