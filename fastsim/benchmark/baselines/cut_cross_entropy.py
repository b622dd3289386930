"""Cut cross entropy: InfoNCE on a GPU, with the candidates as the weights of a classifier.

Its gradient filter is turned off, as it drops entries that a contrastive batch needs.
"""

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, gpu_only


def info_nce(problem):
    from cut_cross_entropy import linear_cross_entropy

    scale = 1 / problem.options["temperature"]
    labels = torch.arange(problem.rows, device=problem.leaves[0].device)

    def call(x, y):
        queries = normalize(x, dim=1) * scale
        return linear_cross_entropy(queries, normalize(y, dim=1), labels, filter_eps=None)

    return call


BASELINE = Baseline("cut-cross-entropy", "cut_cross_entropy", {"info_nce": info_nce}, gpu_only)
