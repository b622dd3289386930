"""Embeddings as operands of products, and the gradient back to the embeddings."""

import torch

from fastsim.precision import compute_dtype


class Rows:
    """Embeddings x (N, D) as operands: unit rows for cosines, the rows themselves otherwise."""

    def unit_rows(self, x, dtype=None):
        """(unit (N, D), inverse norms (N,)); a zero row stays zero with inverse norm 0.

        `dtype` of the unit rows: None for the backend's operand precision.
        """
        raise NotImplementedError

    def scored_rows(self, x):
        """Unit rows of a guide or a teacher, of which only the backend computes scores.

        The result needs slices of rows, a shape, a dtype and a device, nothing else.
        """
        return self.unit_rows(x)[0]

    def tile_rows(self, x):
        """`unit_rows` for the passes over panels, which only hand them back to the backend.

        The rows need a shape, a dtype, a device, `new_empty` and slices of rows, nothing else.
        """
        return self.unit_rows(x)

    def scales_rows(self, dtype):
        """Whether scores of embeddings in `dtype` are exact products of the embeddings, whose norms
        are applied to the scores.
        """
        return False

    def operand(self, rows, dtype):
        """Operands of a selection over embeddings in `dtype`.

        rows: their unit rows in the compute type, or with `scales_rows` the embeddings themselves.
        """
        return rows

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        """(factor * dL/dx in `dtype`, unit . grad_unit (N,)) from dL/dunit; factor is 0-d."""
        raise NotImplementedError

    def gradient_rows(self, rows, dtype):
        """Memory for what `multiply` makes of panels and other rows, of the size of `rows`."""
        return rows.new_empty(rows.shape, dtype=dtype)

    def tile_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        """`unit_rows_backward` from what `multiply` made of panels and `tile_rows`.

        The result may take the place of `grad_rows`.
        """
        return self.unit_rows_backward(grad_rows, x, inverse, factor, dtype)

    def operand_rows(self, x, cosine):
        """`unit_rows`; where the scores are no cosines `plain_rows`, and a one in the place of the
        inverse norms.
        """
        if cosine:
            return self.unit_rows(x)
        rows, ones = self.plain_rows(x)
        return rows, ones.new_ones(())

    def dot_rows(self, x):
        """(rows, size ()): `plain_rows` for the passes over panels, as `tile_rows` is `unit_rows`.

        The products of panels and these rows have yet to be multiplied by `size`.
        """
        return self.operand_rows(x, cosine=False)

    def plain_rows(self, x):
        """`unit_rows` for dot products: (a copy of x as operands, ones (N,))."""
        dtype = compute_dtype(x)
        rows = torch.empty(x.shape, dtype=dtype, device=x.device)
        # Operands of 16-bit inputs may be float16, which lacks the range of bfloat16.
        kind = dtype if x.dtype == torch.bfloat16 else x.dtype
        return self.operand(rows.copy_(x), kind), rows.new_ones(x.shape[0])

    def dot_rows_backward(self, grad_rows, x, size, factor, dtype):
        """(factor * dL/dx in `dtype`, x . dL/dx (N,)) from the products of panels and the rows of
        the other side, whose `size` () this is.
        """
        return ((factor * size) * grad_rows).to(dtype), size * (x * grad_rows).sum(1)
