"""Rows as a backend multiplies them, and the way back."""

import torch


class Rows:
    """Embeddings x (N, D) as operands: unit rows, or for scores that are no cosines as they are."""

    def unit_rows(self, x, dtype=None):
        """(unit (N, D), inverse norms (N,)); a zero row stays zero with inverse norm 0.

        `dtype` of the unit rows: None for the backend's operand precision.
        """
        raise NotImplementedError

    def scored_rows(self, x):
        """Unit rows that only the backend makes scores of: those of a guide or a teacher.

        They need slices of rows, a shape, a dtype and a device, no more.
        """
        return self.unit_rows(x)[0]

    def tile_rows(self, x):
        """`unit_rows` for the passes over panels alone, which hand them back to the backend.

        They need a shape, a dtype, a device, `new_empty` and slices of rows, no more.
        """
        return self.unit_rows(x)

    def scales_rows(self, dtype):
        """Whether `tile_rows` of embeddings in `dtype` multiply these themselves, exactly."""
        return False

    def operand(self, rows, dtype):
        """Operands of a selection over embeddings in `dtype`: of their unit rows in the compute
        type, or of themselves where `scales_rows`.
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
        """(rows, size ()): `plain_rows` for the passes over panels alone, as `tile_rows` are.

        What `multiply` makes of panels and these rows is yet to be multiplied by `size`.
        """
        return self.operand_rows(x, cosine=False)

    def plain_rows(self, x):
        """`unit_rows` for scores that are no cosines: a copy of x as operands, and ones."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = torch.empty(x.shape, dtype=dtype, device=x.device)
        # float16, the operand of 16-bit inputs, has not the range of bfloat16.
        kind = dtype if x.dtype == torch.bfloat16 else x.dtype
        return self.operand(rows.copy_(x), kind), rows.new_ones(x.shape[0])

    def dot_rows_backward(self, grad_rows, x, size, factor, dtype):
        """(factor * dL/dx in `dtype`, x . dL/dx (N,)) from what `multiply` made of panels and the
        rows on the other side, whose `size` () that is.
        """
        return ((factor * size) * grad_rows).to(dtype), size * (x * grad_rows).sum(1)
