"""pytorch-metric-learning: NT-Xent between two views, and SupCon."""

from fastsim.benchmark.rivals.rival import Rival, made


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
    loss, (groups,) = library().SupConLoss(**problem.options), problem.given
    return lambda x: loss(x, groups)


def _rival(name, losses, **options):
    replaced = made(losses, drop_in)
    return Rival(name, "pytorch_metric_learning", made(losses, theirs), drop_in=replaced, **options)


RIVAL = _rival("pytorch-metric-learning", {"sup_con": sup_con})
# Apart, as it takes O(N^3) time and memory.
NT_XENT = _rival("pytorch-metric-learning NT-Xent", {"info_nce": info_nce}, up_to=64)
