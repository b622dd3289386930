"""pytorch-metric-learning: NT-Xent between two views, SupCon and circle."""

from fastsim.benchmark.baselines.baseline import Baseline, with_library


def theirs():
    """The module with the package's losses."""
    from pytorch_metric_learning import losses

    return losses


def drop_in():
    """The module with fastsim's drop-in losses."""
    from fastsim.integrations.pytorch_metric_learning import losses

    return losses


def info_nce(library, problem):
    wrapper = theirs().SelfSupervisedLoss
    return wrapper(library().NTXentLoss(**problem.options), symmetric=False)


def sup_con(library, problem):
    loss, (groups,) = library().SupConLoss(**problem.options), problem.arguments
    return lambda x: loss(x, groups)


def circle(library, problem):
    options, (groups,) = problem.options, problem.arguments
    loss = library().CircleLoss(m=options["margin"], gamma=options["gamma"])
    return lambda x: loss(x, groups)


def _baseline(name, losses, **options):
    replaced, losses = with_library(losses, drop_in), with_library(losses, theirs)
    return Baseline(name, "pytorch_metric_learning", losses, drop_in=replaced, **options)


BASELINE = _baseline("pytorch-metric-learning", {"sup_con": sup_con, "circle": circle})
# A baseline of its own with a lower limit of N, as it takes O(N^3) time and memory.
NT_XENT = _baseline("pytorch-metric-learning NT-Xent", {"info_nce": info_nce}, up_to=64)
