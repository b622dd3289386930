"""Which pairs are positive, negative or left out, without an N x M matrix unless the user has one.

For the score of row i and column j a tile loss needs to know whether the pair takes part, and what
its target is. `Pairs` holds the answers in their smallest form; backends expand it for each tile.
"""

from fastsim.pairs.arguments import (
    as_bias,
    as_ids,
    groups_of_scores,
    known_targets,
    parse_bias,
    parse_exclude,
    parse_groups,
    parse_positives,
    parse_targets,
)
from fastsim.pairs.counts import equal_counts, negative_counts, positive_counts
from fastsim.pairs.dense import dense_targets, not_above, pair_mask
from fastsim.pairs.guide import Guide, with_thresholds, with_unit_rows
from fastsim.pairs.ranks import (
    check_own_targets,
    gather_targets,
    global_exclude,
    global_groups,
    global_positives,
    global_targets,
    parse_own_targets,
)
from fastsim.pairs.record import Factors, Pairs, part_of

__all__ = [
    "Factors",
    "Guide",
    "Pairs",
    "as_bias",
    "as_ids",
    "check_own_targets",
    "dense_targets",
    "equal_counts",
    "gather_targets",
    "global_exclude",
    "global_groups",
    "global_positives",
    "global_targets",
    "groups_of_scores",
    "known_targets",
    "negative_counts",
    "not_above",
    "pair_mask",
    "parse_bias",
    "parse_exclude",
    "parse_groups",
    "parse_own_targets",
    "parse_positives",
    "parse_targets",
    "part_of",
    "positive_counts",
    "with_thresholds",
    "with_unit_rows",
]
