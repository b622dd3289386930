"""Groups of kernel arguments; a kernel reads them by name, and a None costs nothing.

A pointer or a number per field. Pairs are indexed by global row and column; vectors of a loss and
partials belong to the block in hand, n rows by m columns.
"""

from typing import Any, NamedTuple


class Block(NamedTuple):
    """Rows [row0, row1) against columns [column0, column1)."""

    row0: Any
    row1: Any
    column0: Any
    column1: Any


class PairArguments(NamedTuple):
    """`fastsim.pairs.Pairs` for a kernel."""

    positives: Any = None
    row_ids: Any = None
    column_ids: Any = None
    row_groups: Any = None
    column_groups: Any = None
    negative_target: Any = None
    dense: Any = None
    dense_row: Any = None
    dense_column: Any = None
    offset: Any = None


class GuideArguments(NamedTuple):
    """`fastsim.pairs.Guide` for a kernel; unit rows of one stride, or the scores themselves."""

    x_ptr: Any
    y_ptr: Any
    stride: Any
    thresholds: Any


class Numbers(NamedTuple):
    """Parameters of a loss: pointers to the 0-d tensors, so that nothing waits for them."""

    scale: Any = None
    bias: Any = None
    margin: Any = None
    positive_scale: Any = None


class Kept(NamedTuple):
    """Scores kept in 16 bits (see kept.py): codes (n, stride); top and step by tile and row."""

    codes: Any
    stride: Any
    top: Any
    step: Any


class Work(NamedTuple):
    """What is done with the scores of a block.

    A forward reduction fills `partials` (one of the Partials below) and `kept`; a score gradient
    reads its coefficients (one of the Score gradients below) and fills the panel (n, panel_stride).
    """

    pairs: PairArguments
    numbers: Numbers
    partials: Any = None
    coefficients: Any = None
    panel: Any = None
    panel_stride: Any = None
    kept: Kept | None = None
    guide: GuideArguments | None = None


class SoftmaxPartials(NamedTuple):
    """Maximum score and sum of exponentials by tile, for rows and perhaps for columns.

    With positives `positive` (n,) is the score of each, with other targets `target_scores` and
    `target_sums` are the sums of t s and t by tile.
    """

    row_top: Any
    row_sum: Any
    positive: Any = None
    target_scores: Any = None
    target_sums: Any = None
    column_top: Any = None
    column_sum: Any = None


class SoftmaxScoreGrad(NamedTuple):
    """The coefficients of fastsim/tile.py for softmax."""

    row_top: Any
    row_weight: Any
    target_weight: Any
    column_top: Any = None
    column_weight: Any = None


class LossPartials(NamedTuple):
    """Sums of the losses, and of dL/dz where the loss has a bias, by tile and row."""

    loss: Any
    score_grad: Any = None


class Weights(NamedTuple):
    """The weights (n,) of the losses."""

    row: Any


class ContrastPartials(NamedTuple):
    """Maximum and sum of exponentials by tile and row: of negatives, of negated positives."""

    negative_top: Any
    negative_sum: Any
    positive_top: Any = None
    positive_sum: Any = None


class PositivePartials(NamedTuple):
    """Sums of the positives' losses and score gradients by tile and row, from the row's
    negatives.
    """

    loss: Any
    score_grad: Any
    top: Any
    log_sum: Any


class ContrastScoreGrad(NamedTuple):
    """The coefficients of fastsim/tile.py for positives against negatives."""

    negative_top: Any
    negative_weight: Any
    positive_top: Any
    positive_weight: Any


class PositiveScoreGrad(NamedTuple):
    """The coefficients of multi_positive: of the negatives, and the weight of a positive."""

    negative_top: Any
    negative_weight: Any
    log_sum: Any
    positive_weight: Any


class LevelPartials(NamedTuple):
    """(tiles, 4, K): maximum of s, its sum of exponentials, the same of -s; `levels` (K,).

    (No field may be called `values` or `count`: a kernel's tuple has such attributes.)
    """

    out: Any
    levels: Any
    size: Any


class LevelScoreGrad(NamedTuple):
    """The coefficients of fastsim/tile.py for levels, with the `levels` (K,)."""

    high: Any
    up: Any
    low: Any
    down: Any
    levels: Any
    size: Any


class HardestPartials(NamedTuple):
    """Lowest score of the group and highest outside, with their columns, by tile and row.

    `offsets` (M,), where there are any, are taken from the scores by global column.
    """

    low: Any
    low_column: Any
    high: Any
    high_column: Any
    offsets: Any = None


class ClosestPartials(NamedTuple):
    """Largest admitted score and its column by tile and row; `ceiling` (n,) where there is one."""

    top: Any
    column: Any
    ceiling: Any = None
