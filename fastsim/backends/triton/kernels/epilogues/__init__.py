"""The mathematics of each loss on a tile of scores: its partial results, and its score gradient
dL/ds.

The same as csrc/epilogue.h. Every epilogue returns (values of rows, values of columns, score
gradients), each a tuple, empty if it has none. All take the same arguments:

scores: (R, C) s, cosines or dot products; LEFT_OUT for a pair that is left out. There is no mask
    beside them, as a tile of scores fills the registers.
target: (R, C) the targets.
own: (R, C) whether the column is the row's positive.
column: (C,) the indices of the columns.
numbers: scale, bias, margin and positive_scale of the loss, 0 for those it does not have.
of_rows, of_columns: tuples of (R, 1) and (1, C), the coefficients of `fastsim.kinds`.
levels: for CoSENT over a matrix, see levels.py.
SCORE_GRAD: whether an epilogue that can compute both also returns score gradients.

A value that is not stored is not computed: the compiler drops it. A product and a sum that have to
be rounded once are written `tl.fma`; no others are fused, so that s - max is 0 at the maximum.
"""
