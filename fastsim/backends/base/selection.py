"""The columns that scores or distances choose for each row."""

from fastsim.backends import rows as formulas


class Selection:
    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, row_metrics=None):
        """The column (N,) int64 of each row's closest negative, -1 if it has none.

        ceilings: (N,) the scores of the positives, if these are not among the columns.
        row_metrics: as in `TileLoss`.
        """
        raise NotImplementedError

    def hardest(self, pairs, offsets, x, y):
        """The columns ((N,), (N,)) int64 of each row's hardest positive and negative, -1 for none.

        The hardest positive has the lowest x_i . y_j - offsets_j in the row's group, the hardest
        negative the highest outside it. offsets: (M,) or None.
        """
        raise NotImplementedError

    def serves_hardest_pairs(self, rows, width):
        """Whether `hardest_pairs` can serve rows (N, D), and is faster."""
        return False

    def hardest_pairs(self, x, groups):
        """(columns, distances, largest) of rows x (N, D), in the compute type, among each other.

        columns: (2, N) as in `hardest`, by Euclidean distance.
        distances: (2, N) from each row to these, -inf and inf where there is none.
        largest: () as in `centred`.
        """
        raise NotImplementedError

    def centred(self, x, y):
        """Rows whose products order the distances: the closer y_j is to x_i, the larger is
        x_i . y_j - |y_j|^2 / 2.

        x (N, D), y (M, D) or None for x itself, in the compute type. Returns (x, y, halved squared
        norms (M,) of y, largest norm ()). The rows are taken relative to the mean of y, which keeps
        the products small, and divided by the largest norm, which avoids overflow. The largest
        norm is not finite if any input is not.
        """
        return formulas.centred(x, y)

    def top_k(self, queries, corpus, k):
        """The k largest cosines of each query: (values (N, k) descending, indices (N, k))."""
        raise NotImplementedError
