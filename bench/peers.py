"""Other projects' losses on embeddings at hand, called as their documentation says.

Each is a function of x and y (N, D), imported when called, so that one that is not installed costs
its own line of the results and no more.
"""

import functools
import math

import torch
from torch.nn.functional import normalize


@functools.cache
def _ranking_loss(**options):
    from sentence_transformers.sentence_transformer import losses

    return losses.MultipleNegativesRankingLoss(torch.nn.Identity(), **options)


def sentence_transformers_info_nce(x, y):
    """Its in-batch negatives loss; scale 20 is its own."""
    return _ranking_loss().compute_loss_from_embeddings([x, y], None)


def sentence_transformers_symmetric(x, y):
    loss = _ranking_loss(
        directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    return loss.compute_loss_from_embeddings([x, y], None)


def inf_cl_info_nce(x, y):
    """inf-cl 1.2: unit rows, the scale a tensor; float32 inside; a multiple of 64 rows."""
    from inf_cl import cal_inf_loss

    scale = torch.full((), 20.0, device=x.device)
    return cal_inf_loss(normalize(x, dim=1), normalize(y, dim=1), scale=scale)


def inf_cl_symmetric(x, y):
    """Both directions: it has one a call."""
    return (inf_cl_info_nce(x, y) + inf_cl_info_nce(y, x)) / 2


def siglip_kernel_siglip(x, y):
    """siglip-kernel 0.1: unit rows, the logarithm of the scale, a loss divided by N."""
    from siglip_kernel import fused_siglip_loss

    log_scale = torch.full((), math.log(10), device=x.device)
    bias = torch.full((), -10.0, device=x.device)
    return fused_siglip_loss(normalize(x, dim=1), normalize(y, dim=1), log_scale, bias)


PEERS = {
    "info_nce": {
        "sentence-transformers": sentence_transformers_info_nce,
        "inf-cl": inf_cl_info_nce,
    },
    "info_nce symmetric": {
        "sentence-transformers": sentence_transformers_symmetric,
        "inf-cl": inf_cl_symmetric,
    },
    "siglip": {"siglip-kernel": siglip_kernel_siglip},
}
