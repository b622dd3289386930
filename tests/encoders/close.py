"""How near embeddings must be to those of another computation: a derived tolerance, as the losses'.

The truth is computed in float64. An error may be twice that of the other float32 computation.
"""

import copy

import torch

from tests.measure import assert_close


def assert_theirs(found, theirs, texts, call="encode", **options):
    """found: our embeddings of texts; theirs: a model of sentence-transformers, which is float32.

    call: the name of its method; options: of that.
    """

    def encoded():
        return getattr(theirs, call)(texts, convert_to_tensor=True, **options)

    dense = encoded()
    theirs.double()
    truth = encoded()
    theirs.float()  # as it was, bit for bit
    assert truth.dtype == torch.float64
    assert_close("embeddings", found, truth, dense, torch.float32, independent=True)


def assert_alone(found, encoder, texts, **options):
    """found: embeddings of texts by a float32 `Encoder`, as if each text were encoded alone."""
    dense = one_by_one(encoder, texts, **options)
    truth = one_by_one(wide(encoder), texts, dtype=torch.float64, **options)
    assert_close("embeddings", found, truth, dense, torch.float32)


def one_by_one(encoder, texts, **options):
    return torch.cat([encoder.encode([text], **options) for text in texts])


def wide(encoder):
    """A copy of an encoder in float64."""
    return copy.deepcopy(encoder).double()


def rounding(found, truth):
    """The largest error, in roundings of a dtype: of found to truth, which is float64."""
    return (found.double() - truth).abs().max().item() / torch.finfo(found.dtype).eps
