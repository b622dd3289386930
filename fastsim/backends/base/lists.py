"""Losses over a list of scores, MaxSim of token vectors, counts of equal values."""

from fastsim.pairs import counts


class Lists:
    # Up to this many distinct targets, sums by level are cheaper than sorting all entries.
    most_levels = 256

    def equal_counts(self, values, among):
        """How often each of the integers values (N,) occurs in among (M,): (N,) int64."""
        return counts.equal_counts(values, among)

    def max_sim(self, x, y, cosine, own_documents, scores, places):
        """Writes the MaxSim scores (B, K) of queries x and documents y (`fastsim.tokens.Tokens`).

        own_documents: whether each query has documents of its own and is compared with these
            alone; otherwise every query meets all documents.
        places: (K, P) or None; receives the token of the document that each query token chose: the
            first of equal ones, -1 if a mask or an empty document leaves none.
        """
        raise NotImplementedError

    def max_sim_backward(self, grad, places, x, y, cosine, own_documents, needs_grad):
        """The gradients of the rows of x and y, None where not needed, from dL/dscores (B, K)."""
        raise NotImplementedError

    def cosent(self, scores, labels, scale, want_score_grad):
        """(loss (), dL/dscore (M,) or None) of CoSENT over a list of scores."""
        raise NotImplementedError
