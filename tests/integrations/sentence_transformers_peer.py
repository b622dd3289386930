"""sentence-transformers' losses and ours in their place, run on embeddings at hand.

Truth is sentence-transformers' own loss in float64; the tolerance twice its error in float32, of
which one draw is seen, and what rounding a logit or distance does: eps times its size, to the
exponential of a logit relatively.
"""

import itertools

import pytest
import torch

from tests.models import tiny_bert

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations import sentence_transformers as ours

ROWS, WIDTH = 19, 12
DIRECTIONS = [
    ("query_to_doc", *more)
    for size in range(4)
    for more in itertools.combinations(("query_to_query", "doc_to_query", "doc_to_doc"), size)
]
HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
SHARED = [name for name in theirs.__all__ if getattr(ours, name) is not getattr(theirs, name)]


class Given(torch.nn.Module):
    """Stands in for an encoder: the features hold the embeddings."""

    device = torch.device("cpu")

    def __init__(self, max_seq_length=64):
        super().__init__()
        self.max_seq_length = max_seq_length

    def forward(self, features):
        return {"sentence_embedding": features["embeddings"]}

    def __getitem__(self, index):
        return self

    @property
    def tokenizer(self):
        return tokenizer()


class Guided(Given):
    """The guide: the features hold its embeddings too."""

    def forward(self, features):
        return {"sentence_embedding": features["guide"]}


def tokenizer(kept=[]):  # noqa: B006
    import transformers

    if not kept:
        kept.append(transformers.AutoTokenizer.from_pretrained(tiny_bert()))
    return kept[0]


def features(columns):
    return [{"embeddings": column} for column in columns]


def padded(columns):
    """Features that can be cut into mini-batches."""
    return [{"embeddings": c, "input_ids": torch.zeros(len(c), 2)} for c in columns]


def total(loss):
    """A loss, or the sum of those that a dict names."""
    return sum(loss.values()) if isinstance(loss, dict) else loss


def run(loss, columns, labels, dtype, features=features):
    """The loss and the gradients of the columns in a dtype; gradients of parameters after them."""
    loss = loss.to(dtype)
    leaves = [column.detach().to(dtype).requires_grad_() for column in columns]
    if labels is not None and labels.is_floating_point():
        labels = labels.to(dtype)
    value = total(loss(features(leaves), labels))
    value.backward()
    learnt = [p.grad for p in loss.parameters()]
    return [value.detach(), *(leaf.grad for leaf in leaves), *learnt]


def hold(what, runs, size, term=0.0):
    """Ours as near to the truth as theirs; runs: of ours, theirs in float64, theirs in float32.

    Each is [value, gradients...]; `size`: of the largest logit, or distance. term: the largest of
    those whose sum a gradient is, per unit of logit; where they cancel, their rounding stays.
    """
    for part, (got, truth, dense) in enumerate(zip(*runs, strict=True)):
        error, theirs_ = ((v - truth).abs().max().item() for v in (got.double(), dense.double()))
        largest = max(truth.abs().max().item(), 1.0 if part == 0 else term)
        allowed = 2 * (theirs_ + torch.finfo(torch.float32).eps * size * largest)
        assert error <= allowed, f"{what} part {part}: error {error:.3g}, allowed {allowed:.3g}"


RUNS = ((ours, torch.float32), (theirs, torch.float64), (theirs, torch.float32))


def same(name, options, columns, labels=None, features=features):
    """The loss `name` with `options`, for columns of embeddings."""
    runs = []
    for package, dtype in RUNS:
        with torch.random.fork_rng():
            torch.manual_seed(5)  # of a loss's own weights
            loss = getattr(package, name)(Given(), **options)
        runs.append(run(loss, columns, labels, dtype, features))
    scaled_ = name.endswith("RankingLoss") or name in ("CoSENTLoss", "AnglELoss")
    if scaled_:
        size = options.get("scale", 20.0) + options.get("hardness_strength", 0.0)
        if options.get("similarity_fct") is util.dot_score:
            size *= max(column.norm(dim=1).max().item() for column in columns) ** 2
        shortest = min(column.norm(dim=1).min().item() for column in columns)
        term = 1 / (len(columns[0]) * shortest)  # a row's share of the mean, along a unit row
    else:  # the largest distance
        size, term = 2 * max(column.norm(dim=1).max().item() for column in columns), 0.0
    hold(f"{name} {options}", runs, size, term)


def vectors(count, rows=ROWS, width=WIDTH):
    return [torch.randn(rows, width) for _ in range(count)]


def scaled(columns):
    """Columns of lengths away from 1, whose normalisation then matters."""
    return [column * torch.rand(len(column), 1).add(0.3) for column in columns]
