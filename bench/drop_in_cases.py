"""Drop-in losses that no function of fastsim stands for alone: cases and peers for bench/parity.py.

The adapters of fastsim/benchmark/baselines cover the others.
"""

import importlib

import torch

from fastsim.benchmark.baselines import pytorch_metric_learning, sentence_transformers
from fastsim.benchmark.baselines.baseline import Baseline, made
from fastsim.benchmark.baselines.sentence_transformers import Given
from fastsim.benchmark.cases import MEMBERS, Case

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CLASSES = 3
# Losses of pytorch-metric-learning against class weights, and what they call these: W is (D, C),
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


def _by_class(weights, learnt):
    """Class weights (C, D), or the other way round: the weights of a loss that has such."""
    return weights.t() if learnt == "W" else weights


def labelled(name, rows, classes, width, generator):
    """([embeddings (rows, width), class weights as that loss has them], (labels,))."""
    leaves = [torch.randn(count, width, generator=generator) for count in (rows, classes)]
    leaves[1] = _by_class(leaves[1], CLASS_LOSSES[name]).contiguous()
    return leaves, (torch.randint(0, classes, (rows,), generator=generator),)


def _as_many_classes(name):
    """make(rows, width, generator) of as many classes as rows."""
    return lambda rows, width, generator: labelled(name, rows, rows, width, generator)


def _guided(columns):
    """Embeddings, and a guide whose cosines are 0 or 1: rounding decides nothing it leaves out."""

    def make(rows, width, generator):
        leaves, _ = _columns(columns)(rows, width, generator)
        groups = torch.randint(0, 1 + rows // MEMBERS, (rows,), generator=generator)
        return leaves, (torch.nn.functional.one_hot(groups),)

    return make


def _embedded(name, **fixed):
    """make(library, problem) of a sentence-transformers loss of embeddings."""

    def make(library, problem):
        loss = getattr(library(), name)(Given(), **fixed, **problem.options)
        return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), *problem.arguments)

    return make


def _ranking(**fixed):
    """The same without labels, which a ranking does not look at."""

    def make(library, problem):
        name = "MultipleNegativesRankingLoss"
        loss = getattr(library(), name)(Given(), **fixed, **problem.options)
        return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), None)

    return make


def _gist(name):
    """make(library, problem) of a loss with a guide."""

    def make(library, problem):
        loss = getattr(library(), name)(Given(), Given("guides"), **problem.options)

        def call(*leaves):
            (guides,) = problem.arguments
            features = {"guides": guides.to(leaves[0].dtype), "input_ids": guides}
            return loss([{"embeddings": leaf, **features} for leaf in leaves], None)

        return call

    return make


def _mega_batch(library, problem):
    loss = library().MegaBatchMarginLoss(Given())
    return lambda x, y: loss.calculate_loss([[x], [y]])


def _spread_out(library, problem):
    loss = library().GlobalOrthogonalRegularizationLoss(Given())
    return lambda x: sum(loss.compute_loss_from_embeddings([x]).values())


def _tension(library, problem):
    """Two encoders that give the two columns."""
    loss = library().ContrastiveTensionLossInBatchNegatives(Given(), **problem.options)
    loss.model1, loss.model2 = Given("one"), Given("other")
    loss.to(problem.leaves[0].dtype)
    return lambda one, other: loss([{"one": one, "other": other}], None)


def _softmax(library, problem):
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the weights are the loss's own
        loss = library().SoftmaxLoss(Given(), problem.leaves[0].shape[1], CLASSES)
    loss.to(problem.leaves[0].dtype)
    return lambda *leaves: loss([{"embeddings": leaf} for leaf in leaves], *problem.arguments)


def _grouping(name):
    """make(library, problem) of a pytorch-metric-learning loss of embeddings and groups."""

    def make(library, problem):
        loss = getattr(library(), name)(**problem.options)
        return lambda x: loss(x, *problem.arguments)

    return make


def of_classes(name):
    """make(library, problem) of a loss of embeddings and class weights, laid out as it has them."""

    def make(library, problem):
        weights, learnt = problem.leaves[1], CLASS_LOSSES[name]
        with torch.random.fork_rng():  # weights of its own, which ours replace, are drawn
            loss = getattr(library(), name)(*_by_class(weights, learnt).shape, **problem.options)
        delattr(loss, learnt)

        def call(x, weights):
            setattr(loss, learnt, weights)
            return loss(x, *problem.arguments)

        return call

    return make


def _mined(library, problem):
    """The triplets of the package's miner, beside its losses."""
    losses = library()
    package, _, _ = losses.__name__.rpartition(".")
    miner = importlib.import_module(f"{package}.miners").BatchHardMiner()
    loss = losses.TripletMarginLoss(**problem.options)
    return lambda x: loss(x, *problem.arguments, miner(x, *problem.arguments))


def _remembered(library, problem):
    """The second half of the batch against all of it, the first kept from a step before."""
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
    """[(Case, Baseline)] of a package's losses."""
    package = library.BASELINE.package
    for name, (make, options, adapter) in losses.items():
        replaced = made({name: adapter}, library.drop_in)
        theirs = made({name: adapter}, library.theirs)
        yield (
            Case(name, None, make, options),
            Baseline(library.BASELINE.name, package, theirs, drop_in=replaced),
        )


DROP_INS = [
    *_pairs(sentence_transformers, _SENTENCES),
    *_pairs(pytorch_metric_learning, _METRICS),
]
