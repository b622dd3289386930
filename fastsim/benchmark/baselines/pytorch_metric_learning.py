"""pytorch-metric-learning: NT-Xent between two views, SupCon and circle."""

from fastsim.benchmark.baselines.baseline import Baseline, made


def theirs():
    from pytorch_metric_learning import losses

    return losses


def drop_in():
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
    replaced, losses = made(losses, drop_in), made(losses, theirs)
    return Baseline(name, "pytorch_metric_learning", losses, drop_in=replaced, **options)


BASELINE = _baseline("pytorch-metric-learning", {"sup_con": sup_con, "circle": circle})
# Apart, as it takes O(N^3) time and memory.
NT_XENT = _baseline("pytorch-metric-learning NT-Xent", {"info_nce": info_nce}, up_to=64)
