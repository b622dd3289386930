"""The rows of a sweep over prefixes, and the gradient through their norms.

Formulas and terms: fastsim/engine/sweep.py.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from fastsim.precision import compute_dtype, widened


def own_columns(widths):
    """The slice of each prefix's own columns."""
    return [slice(*own) for own in pairwise([0, *widths])]


@dataclass
class Prefixes:
    """The own columns of every prefix of rows x (N, D), as operands of products.

    rows: for each width (N, own columns), divided by the norm of the prefix; zeros if it is 0.
    inverses: for each width 1 / norm (N,) in float64; for a prefix of zeros that of the next longer
        prefix, 0 if all are zeros.
    ratios: for each width but the last r_{k+1} (N,), the factor of its scores in the next ones.
    zeros: for each width (N,) bool, whether the prefix is zero; its scores have no gradient then.

    ratios and zeros are empty for dot products.
    """

    rows: list
    inverses: list
    ratios: list = field(default_factory=list)
    zeros: list = field(default_factory=list)

    def __len__(self):
        return len(self.rows[0])

    @classmethod
    def of(cls, x, widths, cosine, backend):
        """The prefixes of x (N, D). cosine: whether scores are cosines, or dot products."""
        parts = [x[:, own] for own in own_columns(widths)]
        if not cosine:
            plain = [backend.plain_rows(part) for part in parts]
            return cls([rows for rows, _ in plain], [widened(ones) for _, ones in plain])
        dtype = compute_dtype(x)
        norm = x.new_zeros(len(x), dtype=torch.float64)
        rows, inverses, zeros = [], [], []
        for part in parts:
            over_norm, norm = backend.prefix_rows(part, norm)
            rows.append(over_norm)
            zeros.append(norm < torch.finfo(dtype).tiny)
            inverses.append(norm.reciprocal().masked_fill_(zeros[-1], 0.0))
        for k in reversed(range(len(widths) - 1)):
            inverses[k] = torch.where(zeros[k], inverses[k + 1], inverses[k])
        ratios = [
            torch.where(one == 0, 0.0, longer / one).to(dtype) for one, longer in pairwise(inverses)
        ]
        return cls(rows, inverses, ratios, zeros)

    def backward(self, products, x, dots, grad, widths, backend):
        """Writes dL/dx (N, D) to `grad` and returns sum_k a_k of each row, (N,) in float64.

        products: H_k y_k[own] for each width. dots: d_k, (K - 1, N).
        """
        owns = own_columns(widths)
        # sums[k] becomes a_1 + ... + a_k. Without d_k it is the sum over the products.
        sums = [x.new_zeros(len(x), dtype=torch.float64)]
        for product, own, inverse in zip(products, owns, self.inverses, strict=True):
            sums.append(sums[-1].clone())
            backend.prefix_rows_dots(product, x[:, own], inverse, sums[-1])
        total = sums[-1]
        if not self.ratios:
            torch.cat(products, 1, out=grad)
            return total
        for prefix_sum, dot in zip(sums[1:-1], dots, strict=True):
            prefix_sum.sub_(dot)
        along = 0.0  # s_{k + 1}, then s_k
        for k in reversed(range(len(owns))):
            from_longer = self.ratios[k] * along if k < len(self.ratios) else 0.0
            along = (sums[k + 1] - sums[k]) * self.inverses[k] + from_longer
            values, own_grad = x[:, owns[k]], grad[:, owns[k]]
            backend.prefix_rows_backward(products[k], values, along, self.inverses[k], own_grad)
        return total
