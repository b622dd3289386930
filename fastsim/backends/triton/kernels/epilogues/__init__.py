"""The mathematics of each loss on a tile of scores: what it keeps of it, and its score gradient
dL/ds.

The twin of csrc/epilogue.h. Every epilogue takes the same and returns (values of rows, values of
columns, score gradients), each a tuple, empty where it has none:

scores (R, C): s, cosines or dot products; LEFT_OUT of a pair that takes no part. No mask is kept
    beside them, for a tile of scores fills the registers.
target (R, C), own (R, C): the targets, and whether the column is the row's positive.
column (C,): their indices.
numbers: scale, bias, margin and positive_scale of the loss, 0 where it has none.
of_rows, of_columns: tuples of (R, 1) and (1, C), what `fastsim.kinds` calls coefficients.
levels: of CoSENT over a matrix alone, see there.
SCORE_GRAD: whether an epilogue with both is asked for score gradients too.

A value that nobody stores is not computed: the compiler drops it. A product and a sum that are to
be rounded once are written `tl.fma`; no others are joined, so that s - max is 0 at the maximum.
"""
