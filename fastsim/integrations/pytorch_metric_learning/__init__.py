"""Losses of pytorch-metric-learning without its N x N matrices: change the import alone.

    from fastsim.integrations.pytorch_metric_learning import losses, miners

`losses` has NTXentLoss, SupConLoss, MultiSimilarityLoss, TripletMarginLoss and CrossBatchMemory,
`miners` has BatchHardMiner; every other name of theirs is theirs. Arguments, defaults, reducers,
regularizers and results are those of version 2.9, whose classes these are made of. Where an option
has no fused form the answer is theirs, by their code, and a warning says so once.
"""

from fastsim.integrations.pytorch_metric_learning import losses, miners

__all__ = ["losses", "miners"]
