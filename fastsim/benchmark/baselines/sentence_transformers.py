"""sentence-transformers' losses on embeddings at hand, plain and cached (GradCache)."""

import functools

import torch

from fastsim.benchmark.baselines.baseline import Baseline, made
from fastsim.benchmark.cases import prefixes

# Mini-batch of the cached loss: its default.
MINI_BATCH = 32


def theirs():
    from sentence_transformers.sentence_transformer import losses

    return losses


def drop_in():
    from fastsim.integrations import sentence_transformers

    return sentence_transformers


def _loss(library, name, **options):
    """A loss whose encoder does nothing."""
    return getattr(library(), name)(torch.nn.Sequential(torch.nn.Identity()), **options)


def _embedded(loss, labels=None):
    return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), labels)


def info_nce(library, problem):
    scale = 1 / problem.options["temperature"]
    return _embedded(_loss(library, "MultipleNegativesRankingLoss", scale=scale))


def info_nce_directions(library, problem):
    scale, directions = 1 / problem.options["temperature"], problem.options["directions"]
    name = "MultipleNegativesRankingLoss"
    return _embedded(_loss(library, name, scale=scale, directions=directions))


class Given(torch.nn.Module):
    """Stands in for an encoder: features of that name are the embeddings, of `width` numbers."""

    device, max_seq_length = torch.device("cpu"), 64

    def __init__(self, name="embeddings", width=None):
        super().__init__()
        self.name, self.width = name, width

    def get_embedding_dimension(self):
        return self.width

    def forward(self, features):
        return {"sentence_embedding": features[self.name]}

    def __getitem__(self, index):
        return self

    @property
    def tokenizer(self):
        return _tokenizer()


@functools.cache
def _tokenizer():
    """Any at all: losses with a guide compare those of the two encoders."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"word": 0})))


def info_nce_prefixes(library, problem):
    scale, width = 1 / problem.options["temperature"], problem.leaves[0].shape[1]
    encoder, losses = Given(width=width), library()
    loss = losses.MultipleNegativesRankingLoss(encoder, scale=scale)
    loss = losses.MatryoshkaLoss(encoder, loss, list(prefixes(width)))
    return lambda *leaves: loss([{"embeddings": leaf} for leaf in leaves], None)


def guided_info_nce(library, problem):
    guides = problem.arguments
    encoders = Given(), Given("guides")
    names = ("contrast_anchors", "contrast_positives")  # its defaults compare these too
    loss = library().GISTEmbedLoss(*encoders, **problem.options, **dict.fromkeys(names, False))

    def call(*leaves):
        both = zip(leaves, guides, strict=True)
        features = [{"embeddings": leaf, "guides": guide.to(leaf.dtype)} for leaf, guide in both]
        return loss(features, None)

    return call


def cosent(library, problem):
    # The scores in place of embeddings, and their similarity the scores themselves.
    loss = _loss(library, "CoSENTLoss", similarity_fct=lambda s, _: s, **problem.options)
    embedded = _embedded(loss, *problem.arguments)
    return lambda scores: embedded(scores, scores)


def angle(library, problem):
    return _embedded(_loss(library, "AnglELoss", **problem.options), *problem.arguments)


def cosine_regression(library, problem):
    return _embedded(_loss(library, "CosineSimilarityLoss"), *problem.arguments)


def triplet_margin(library, problem):
    return _embedded(_loss(library, "TripletLoss", triplet_margin=problem.options["margin"]))


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known when it is: what the cached loss hands to the encoder."""

    @staticmethod
    def forward(ctx, loss, grad_x, grad_y, x, y):
        ctx.save_for_backward(grad_x, grad_y)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(grad * g for g in ctx.saved_tensors)


def cached_info_nce(library, problem):
    """The loss stage alone, without the encoder's two passes."""
    name, scale = "CachedMultipleNegativesRankingLoss", 1 / problem.options["temperature"]
    loss = _loss(library, name, scale=scale, mini_batch_size=MINI_BATCH)

    def call(x, y):
        wants = torch.is_grad_enabled()
        parts = [
            [part.detach().requires_grad_(wants) for part in side.split(MINI_BATCH)]
            for side in (x, y)
        ]
        value = loss.calculate_loss(parts, None, with_backward=wants)
        if not wants:
            return value
        grads = (torch.cat([part.grad for part in side]) for side in parts)
        return _Computed.apply(value, *grads, x, y)

    return call


_PLAIN = {
    "info_nce": info_nce,
    "info_nce directions": info_nce_directions,
    "info_nce prefixes": info_nce_prefixes,
    "info_nce guided": guided_info_nce,
    "cosent": cosent,
    "cosent distinct": cosent,
    "angle": angle,
    "cosine_regression": cosine_regression,
    "triplet_margin": triplet_margin,
}
_CACHED = {"info_nce": cached_info_nce}


def _baseline(name, losses, **options):
    replaced = made(losses, drop_in)
    return Baseline(
        name, "sentence_transformers", made(losses, theirs), drop_in=replaced, **options
    )


BASELINE = _baseline("sentence-transformers", _PLAIN)
CACHED = _baseline("sentence-transformers cached", _CACHED, up_to=2048)
