"""What is left: losses over a list of scores, token vectors, counts."""

from fastsim.pairs import counts


class Lists:
    # Distinct targets up to which sums per level are cheaper than a sort of all entries.
    most_levels = 256

    def equal_counts(self, values, among):
        """How many of the integers among (M,) each of the integers values (N,) is: (N,) int64."""
        return counts.equal_counts(values, among)

    def max_sim(self, x, y, cosine, own, scores, places):
        """Writes MaxSim scores (B, K) of queries x and documents y (`fastsim.tokens.Tokens`).

        own: the documents are of one query each, else every query meets all. places (K, P), or
        None: the token of the document that each query token chose, the first of equals, -1 where
        a mask or an empty document leaves none.
        """
        raise NotImplementedError

    def max_sim_backward(self, grad, places, x, y, cosine, own, wants):
        """Gradients of the rows of x and y, None where not wanted, from dL/dscores (B, K)."""
        raise NotImplementedError

    def cosent(self, scores, labels, scale, want_score_grad):
        """(loss (), dL/dscore (M,) or None) of CoSENT over a list of scores."""
        raise NotImplementedError
