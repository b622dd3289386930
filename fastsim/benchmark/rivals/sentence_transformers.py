"""sentence-transformers' losses on embeddings at hand, plain and cached (GradCache)."""

import torch

from fastsim.benchmark.rivals.rival import Rival

# Mini-batch of the cached loss: its default.
MINI_BATCH = 32


def _loss(name, **options):
    from sentence_transformers.sentence_transformer import losses

    return getattr(losses, name)(torch.nn.Sequential(torch.nn.Identity()), **options)


def _embedded(loss, labels=None):
    return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), labels)


def info_nce(problem):
    scale = 1 / problem.options["temperature"]
    return _embedded(_loss("MultipleNegativesRankingLoss", scale=scale))


def cosent(problem):
    loss = _loss("CoSENTLoss", similarity_fct=lambda s, _: s, **problem.options)
    embedded = _embedded(loss, *problem.given)
    return lambda scores: embedded(scores, scores)


def angle(problem):
    return _embedded(_loss("AnglELoss", **problem.options), *problem.given)


def cosine_regression(problem):
    return _embedded(_loss("CosineSimilarityLoss"), *problem.given)


def triplet_margin(problem):
    return _embedded(_loss("TripletLoss", triplet_margin=problem.options["margin"]))


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known when it is: what the cached loss hands to the encoder."""

    @staticmethod
    def forward(ctx, loss, grad_x, grad_y, x, y):
        ctx.save_for_backward(grad_x, grad_y)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(grad * g for g in ctx.saved_tensors)


def cached_info_nce(problem):
    """The loss stage alone, without the encoder's two passes."""
    scale = 1 / problem.options["temperature"]
    loss = _loss("CachedMultipleNegativesRankingLoss", scale=scale, mini_batch_size=MINI_BATCH)

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


RIVAL = Rival(
    "sentence-transformers",
    "sentence_transformers",
    {
        "info_nce": info_nce,
        "cosent": cosent,
        "cosent distinct": cosent,
        "angle": angle,
        "cosine_regression": cosine_regression,
        "triplet_margin": triplet_margin,
    },
)
CACHED = Rival(
    "sentence-transformers cached",
    "sentence_transformers",
    {"info_nce": cached_info_nce},
    up_to=2048,
)
