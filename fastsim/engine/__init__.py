"""The engine: a loss over all scores of x and y, and its gradient, without the matrix of scores.

    prepare      x, y -> unit rows, inverse norms
    forward      scores -> state of rows, columns or matrix   (fastsim/kinds)
    finish       state -> losses
    coefficients state, dL/dloss -> what a score gradient needs beside its score
    score_grad   scores, coefficients -> G = dL/dS
    product      dunit_x = G unit_y,  dunit_y += G^T unit_x   (library products)
    backward     dx = r (dunit_x - (unit_x . dunit_x) unit_x)

Scores exist one block at a time:

               columns (rows of y)
            +--------+--------+----+   band    a slice of rows against all columns
            |        |        |    |   block   a slice of a band's rows against a slice of columns:
     rows   | block  |        |    | band      what a backend works on at once
    (of x)  |        |        |    |   panel   the memory of a block: its scores, which become its
            +--------+--------+----+           score gradients in place; one is alive at a time
            |  |  |  |        |    |   tile    the part of a block that one program of a GPU kernel
            |--+--+--|        |    |           works on; a "tile loss" is a loss that is made of
            | tile|  |        |    |           tiles, or panels, of scores in this way
            +--------+--------+----+

A backend says how large its blocks are: so that a panel stays in cache on a CPU, and so that it
fills a GPU. A block of whole rows is one that is as wide as the matrix, that is, a band of its own.
"""
