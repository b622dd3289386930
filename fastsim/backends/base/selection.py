"""The columns that scores or distances choose for each row."""

from fastsim.backends import rows as formulas


class Selection:
    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, seen=None):
        """Column (N,) int64 of each row's closest negative, -1 where it has none.

        ceilings (N,): the positives' scores, where positives are not among these columns. seen: as
        `Tile.seen`.
        """
        raise NotImplementedError

    def hardest(self, pairs, offsets, x, y):
        """Columns ((N,), (N,)) int64 of each row's hardest positive and hardest negative.

        The lowest score x_i . y_j - offsets_j of the row's group and the highest of any other,
        -1 where there is none; `offsets` (M,) may be None.
        """
        raise NotImplementedError

    def serves_hardest_pairs(self, rows, width):
        """Whether `hardest_pairs` serves so many rows of that width, and pays."""
        return False

    def hardest_pairs(self, x, groups):
        """(columns, distances, largest): of rows x (N, D) in the compute type against each other.

        columns (2, N): as `hardest`, of Euclidean distances; distances (2, N): of each row to
        these, -inf and inf where there is none; largest (): as of `centred`.
        """
        raise NotImplementedError

    def centred(self, x, y):
        """Rows between which products tell the distances: x_i . y_j - |y_j|^2 / 2 falls with them.

        x (N, D), y (M, D) or None: x itself, in the compute type. Returns both relative to the
        centre of y, which changes no distance and makes the products small, in units of the
        largest norm, which keeps them away from the ends of the range; the halved squares of the
        norms of y's (M,) in these units; and that largest norm (), not finite if any number is not.
        """
        return formulas.centred(x, y)

    def top_k(self, queries, corpus, k):
        """(values (N, k) descending, indices (N, k)) of the cosines."""
        raise NotImplementedError
