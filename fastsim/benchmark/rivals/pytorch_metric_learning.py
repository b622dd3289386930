"""pytorch-metric-learning: NT-Xent between two views, and SupCon."""

from fastsim.benchmark.rivals.rival import Rival


def info_nce(problem):
    from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss

    return SelfSupervisedLoss(NTXentLoss(**problem.options), symmetric=False)


def sup_con(problem):
    from pytorch_metric_learning.losses import SupConLoss

    loss, (groups,) = SupConLoss(**problem.options), problem.given
    return lambda x: loss(x, groups)


_PACKAGE = "pytorch_metric_learning"

RIVAL = Rival("pytorch-metric-learning", _PACKAGE, {"sup_con": sup_con})
# Apart, as it takes O(N^3) time and memory.
NT_XENT = Rival("pytorch-metric-learning NT-Xent", _PACKAGE, {"info_nce": info_nce}, up_to=64)
