"""The losses of sentence-transformers on given embeddings, plain and cached (GradCache)."""

import functools

import torch

from fastsim.benchmark.baselines.baseline import Baseline, with_library
from fastsim.benchmark.cases import prefixes

MINI_BATCH = 32  # the default of the cached loss


def theirs():
    """The module with the package's losses."""
    from sentence_transformers.sentence_transformer import losses

    return losses


def drop_in():
    """The module with fastsim's drop-in losses."""
    from fastsim.integrations import sentence_transformers

    return sentence_transformers


def _loss(library, name, **options):
    """A loss with an encoder that does nothing."""
    return getattr(library(), name)(torch.nn.Sequential(torch.nn.Identity()), **options)


def _on_embeddings(loss, labels=None):
    return lambda *leaves: loss.compute_loss_from_embeddings(list(leaves), labels)


def info_nce(library, problem):
    scale = 1 / problem.options["temperature"]
    return _on_embeddings(_loss(library, "MultipleNegativesRankingLoss", scale=scale))


def info_nce_directions(library, problem):
    scale, directions = 1 / problem.options["temperature"], problem.options["directions"]
    name = "MultipleNegativesRankingLoss"
    return _on_embeddings(_loss(library, name, scale=scale, directions=directions))


class IdentityEncoder(torch.nn.Module):
    """Stands in for an encoder: its embeddings are the features of that name.

    width: that of the embeddings.
    """

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
    """Some tokenizer: losses with a guide compare the tokenizers of the two encoders."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"word": 0})))


def info_nce_prefixes(library, problem):
    scale, width = 1 / problem.options["temperature"], problem.leaves[0].shape[1]
    encoder, losses = IdentityEncoder(width=width), library()
    loss = losses.MultipleNegativesRankingLoss(encoder, scale=scale)
    loss = losses.MatryoshkaLoss(encoder, loss, list(prefixes(width)))
    return lambda *leaves: loss([{"embeddings": leaf} for leaf in leaves], None)


def guided_info_nce(library, problem):
    guides = problem.arguments
    encoders = IdentityEncoder(), IdentityEncoder("guides")
    names = ("contrast_anchors", "contrast_positives")  # by default the loss contrasts these too
    loss = library().GISTEmbedLoss(*encoders, **problem.options, **dict.fromkeys(names, False))

    def call(*leaves):
        both = zip(leaves, guides, strict=True)
        features = [{"embeddings": leaf, "guides": guide.to(leaf.dtype)} for leaf, guide in both]
        return loss(features, None)

    return call


def cosent(library, problem):
    # The scores take the place of embeddings, and their similarity is the scores themselves.
    loss = _loss(library, "CoSENTLoss", similarity_fct=lambda s, _: s, **problem.options)
    embedded = _on_embeddings(loss, *problem.arguments)
    return lambda scores: embedded(scores, scores)


def angle(library, problem):
    return _on_embeddings(_loss(library, "AnglELoss", **problem.options), *problem.arguments)


def cosine_regression(library, problem):
    return _on_embeddings(_loss(library, "CosineSimilarityLoss"), *problem.arguments)


def triplet_margin(library, problem):
    return _on_embeddings(_loss(library, "TripletLoss", triplet_margin=problem.options["margin"]))


class _Computed(torch.autograd.Function):
    """A loss with precomputed gradients, as the cached loss passes it to the encoder."""

    @staticmethod
    def forward(ctx, loss, grad_x, grad_y, x, y):
        ctx.save_for_backward(grad_x, grad_y)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(grad * g for g in ctx.saved_tensors)


def cached_info_nce(library, problem):
    """The stage of the loss alone, without the two passes of the encoder."""
    name, scale = "CachedMultipleNegativesRankingLoss", 1 / problem.options["temperature"]
    loss = _loss(library, name, scale=scale, mini_batch_size=MINI_BATCH)

    def call(x, y):
        needs_grad = torch.is_grad_enabled()
        parts = [
            [part.detach().requires_grad_(needs_grad) for part in side.split(MINI_BATCH)]
            for side in (x, y)
        ]
        value = loss.calculate_loss(parts, None, with_backward=needs_grad)
        if not needs_grad:
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
    replaced = with_library(losses, drop_in)
    return Baseline(
        name, "sentence_transformers", with_library(losses, theirs), drop_in=replaced, **options
    )


BASELINE = _baseline("sentence-transformers", _PLAIN)
CACHED = _baseline("sentence-transformers cached", _CACHED, up_to=2048)
