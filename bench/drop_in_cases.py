"""Cases and peers for bench/parity.py: drop-in losses without a single function in fastsim.

The adapters of fastsim/benchmark/baselines cover the other drop-in losses.
"""

import importlib

import torch

from fastsim.benchmark.baselines import pytorch_metric_learning, sentence_transformers
from fastsim.benchmark.baselines.baseline import Baseline, with_library
from fastsim.benchmark.baselines.sentence_transformers import IdentityEncoder
from fastsim.benchmark.cases import MEMBERS, Case

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CLASSES = 3
# Losses of pytorch-metric-learning with class weights, and their name for these: W is (D, C),
# proxies are (C, D).
CLASS_LOSSES = {
    "NormalizedSoftmaxLoss": "W",
    "CosFaceLoss": "W",
    "ArcFaceLoss": "W",
    "ProxyNCALoss": "proxies",
    "ProxyAnchorLoss": "proxies",
}


def _columns(count):
    def make(rows, width, generator):
        return [torch.randn(rows, width, generator=generator) for _ in range(count)], ()

    return make


def _grouped(rows, width, generator):
    leaves, _ = _columns(1)(rows, width, generator)
    return leaves, (torch.arange(rows) // MEMBERS,)


def _classified(rows, width, generator):
    leaves, _ = _columns(2)(rows, width, generator)
    return leaves, (torch.randint(0, CLASSES, (rows,), generator=generator),)


def _in_layout(weights, name):
    """Class weights (C, D) in the layout of the parameter `name`, or back from it."""
    return weights.t() if name == "W" else weights


def labelled(name, rows, classes, width, generator):
    """([embeddings (rows, width), class weights in the layout of the loss], (labels,))."""
    leaves = [torch.randn(count, width, generator=generator) for count in (rows, classes)]
    leaves[1] = _in_layout(leaves[1], CLASS_LOSSES[name]).contiguous()
    return leaves, (torch.randint(0, classes, (rows,), generator=generator),)


def _as_many_classes(name):
    """make(rows, width, generator) with as many classes as rows."""
    return lambda rows, width, generator: labelled(name, rows, rows, width, generator)


def _guided(columns):
    """Embeddings, and a guide with cosines 0 or 1, whose decisions rounding does not change."""

    def make(rows, width, generator):
        leaves, _ = _columns(columns)(rows, width, generator)
        groups = torch.randint(0, 1 + rows // MEMBERS, (rows,), generator=generator)
        return leaves, (torch.nn.functional.one_hot(groups),)

    return make


def _embedded(name, **fixed):
    """make(library, problem) for a loss of sentence-transformers on embeddings and labels."""

    def make(library, problem):
        loss = getattr(library(), name)(IdentityEncoder(), **fixed, **problem.options)
        return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), *problem.arguments)

    return make


def _ranking(**fixed):
    """make(library, problem) for a ranking loss, which ignores labels."""

    def make(library, problem):
        name = "MultipleNegativesRankingLoss"
        loss = getattr(library(), name)(IdentityEncoder(), **fixed, **problem.options)
        return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), None)

    return make


def _gist(name):
    """make(library, problem) for a loss with a guide."""

    def make(library, problem):
        loss = getattr(library(), name)(
            IdentityEncoder(), IdentityEncoder("guides"), **problem.options
        )

        def call(*leaves):
            (guides,) = problem.arguments
            features = {"guides": guides.to(leaves[0].dtype), "input_ids": guides}
            return loss([{"embeddings": leaf, **features} for leaf in leaves], None)

        return call

    return make


def _mega_batch(library, problem):
    loss = library().MegaBatchMarginLoss(IdentityEncoder())
    return lambda x, y: loss.calculate_loss([[x], [y]])


def _spread_out(library, problem):
    loss = library().GlobalOrthogonalRegularizationLoss(IdentityEncoder())
    return lambda x: sum(loss.compute_loss_from_embeddings([x]).values())


def _tension(library, problem):
    """Contrastive tension, whose two encoders return the two columns."""
    loss = library().ContrastiveTensionLossInBatchNegatives(IdentityEncoder(), **problem.options)
    loss.model1, loss.model2 = IdentityEncoder("one"), IdentityEncoder("other")
    loss.to(problem.leaves[0].dtype)
    return lambda one, other: loss([{"one": one, "other": other}], None)


def _softmax(library, problem):
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for the initial weights of the loss
        loss = library().SoftmaxLoss(IdentityEncoder(), problem.leaves[0].shape[1], CLASSES)
    loss.to(problem.leaves[0].dtype)
    return lambda *leaves: loss([{"embeddings": leaf} for leaf in leaves], *problem.arguments)


def _grouping(name):
    """make(library, problem) for a loss of pytorch-metric-learning on embeddings and groups."""

    def make(library, problem):
        loss = getattr(library(), name)(**problem.options)
        return lambda x: loss(x, *problem.arguments)

    return make


def of_classes(name):
    """make(library, problem) for a loss on embeddings and class weights in its layout."""

    def make(library, problem):
        weights, parameter = problem.leaves[1], CLASS_LOSSES[name]
        with torch.random.fork_rng():  # the loss draws initial weights, which are replaced
            shape = _in_layout(weights, parameter).shape
            loss = getattr(library(), name)(*shape, **problem.options)
        delattr(loss, parameter)

        def call(x, weights):
            setattr(loss, parameter, weights)
            return loss(x, *problem.arguments)

        return call

    return make


def _mined(library, problem):
    """The triplet margin loss on triplets of the miner in the same package."""
    losses = library()
    package, _, _ = losses.__name__.rpartition(".")
    miner = importlib.import_module(f"{package}.miners").BatchHardMiner()
    loss = losses.TripletMarginLoss(**problem.options)
    return lambda x: loss(x, *problem.arguments, miner(x, *problem.arguments))


def _remembered(library, problem):
    """CrossBatchMemory: a step with the first half of the batch, then one with the second half."""
    losses = library()
    x = problem.leaves[0]
    groups = problem.arguments[0] % (1 + len(x) // (2 * MEMBERS))  # halves share groups
    half = len(x) // 2

    def call(x):
        loss = losses.NTXentLoss(**problem.options)
        memory = losses.CrossBatchMemory(loss, x.shape[1], memory_size=len(x)).to(x.dtype)
        return sum(memory(x[part], groups[part]) for part in (slice(half), slice(half, None)))

    return call


_MARGIN = {"margin": 1.0}
_HARD = {"hardness_mode": "all_negatives", "hardness_strength": 5.0}
_SENTENCES = {
    "ranking, hard negatives": (_columns(4), {"scale": 20.0}, _ranking()),
    "ranking, four directions": (_columns(3), {"scale": 20.0}, _ranking(directions=DIRECTIONS)),
    "ranking, hardness": (_columns(3), {"scale": 20.0}, _ranking(**_HARD)),
    "guided": (_guided(3), {"temperature": 0.05}, _gist("GISTEmbedLoss")),
    "guided, cached": (_guided(4), {"temperature": 0.05}, _gist("CachedGISTEmbedLoss")),
    "batch all triplet": (_grouped, _MARGIN, _embedded("BatchAllTripletLoss")),
    "batch hard triplet": (_grouped, _MARGIN, _embedded("BatchHardTripletLoss")),
    "batch semi-hard triplet": (_grouped, _MARGIN, _embedded("BatchSemiHardTripletLoss")),
    "batch soft triplet": (_grouped, {}, _embedded("BatchHardSoftMarginTripletLoss")),
    "mega-batch margin": (_columns(2), {}, _mega_batch),
    "softmax": (_classified, {}, _softmax),
    "spread-out": (_columns(1), {}, _spread_out),
    "contrastive tension": (_columns(2), {"scale": 20.0}, _tension),
}
_METRICS = {
    "NT-Xent": (_grouped, {"temperature": 0.1}, _grouping("NTXentLoss")),
    "multi-similarity": (_grouped, {}, _grouping("MultiSimilarityLoss")),
    "NT-Xent with a memory": (_grouped, {"temperature": 0.1}, _remembered),
    "batch-hard triplets": (_grouped, {"margin": 0.2}, _mined),
}
_METRICS |= {name: (_as_many_classes(name), {}, of_classes(name)) for name in CLASS_LOSSES}


def _pairs(library, losses):
    """Yields (Case, Baseline) of the losses of a package.

    library: its module in fastsim/benchmark/baselines.
    """
    package = library.BASELINE.package
    for name, (make, options, adapter) in losses.items():
        drop_in = with_library({name: adapter}, library.drop_in)
        theirs = with_library({name: adapter}, library.theirs)
        yield (
            Case(name, None, make, options),
            Baseline(library.BASELINE.name, package, theirs, drop_in=drop_in),
        )


DROP_INS = [
    *_pairs(sentence_transformers, _SENTENCES),
    *_pairs(pytorch_metric_learning, _METRICS),
]
