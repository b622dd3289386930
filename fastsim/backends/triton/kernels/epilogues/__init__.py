"""The mathematics of each loss on a tile of scores: partial results, and score gradients dL/ds.

The mathematics is that of csrc/epilogue.h. Every epilogue returns (values of rows, values of
columns, score gradients). Each of these is a tuple, which is empty if the epilogue has none. All
epilogues take the same arguments:

scores: (R, C) s, cosines or dot products; LEFT_OUT for a pair that is left out. A tile of scores
    fills the registers, so there is no mask beside it.
target: (R, C) the targets.
is_positive: (R, C) whether the column is the row's positive.
column: (C,) the indices of the columns.
numbers: scale, bias, margin and positive_scale of the loss. A number that it does not have is 0.
row_coefficients: a tuple of coefficients (R, 1) of the rows (`fastsim.kinds`).
column_coefficients: a tuple of coefficients (1, C) of the columns.
levels: the levels of CoSENT over a matrix (levels.py).
SCORE_GRAD: whether an epilogue that can compute both also returns score gradients.

The compiler drops the computation of a value that is not stored. Where a product and a sum have to
be rounded once, they are written as `tl.fma`. No others are fused, so that s - max is 0 at the
maximum.
"""
