"""Classification of sentence pairs, Sentence-BERT's classification objective.

    L_i = cross entropy of W (u_i; v_i; |u_i - v_i|) with label_i

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3, figure 1.
"""

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.autocast import without_autocast
from fastsim.checks import (
    check_alike,
    check_count,
    check_embeddings,
    check_integers,
    check_range,
    check_reduction,
)
from fastsim.reduce import as_float


class SoftmaxClassification(torch.nn.Module):
    """Cross entropy of W (u; v; |u - v|); W (num_labels, 3 dim) is learnt, without a bias.

    For pairs with a class (entailment, contradiction, neither), as in Sentence-BERT.

    Args:
        dim: the width of the embeddings.
        num_labels: the number of classes; labels are 0 to num_labels - 1.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: for arguments that do not fit.

    Example:
        >>> loss = fastsim.losses.SoftmaxClassification(dim=8, num_labels=3)
        >>> loss(torch.randn(4, 8), torch.randn(4, 8), torch.tensor([0, 2, 1, 0])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, num_labels: int, *, reduction: Reduction = "mean") -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_labels", num_labels)):
            check_count(name, value)
        check_reduction(reduction)
        self.dim, self.num_labels, self.reduction = dim, num_labels, reduction
        self.classifier = torch.nn.Linear(3 * dim, num_labels, bias=False)

    def logits(self, u: Tensor, v: Tensor) -> Tensor:
        """The class logits (N, num_labels) of paired rows u, v (N, dim), in the compute type."""
        check_embeddings("u", u)
        check_embeddings("v", v)
        check_alike("v", v, "u", u, rows=True)
        if u.shape[1] != self.dim:
            raise ValueError(f"u: wanted width {self.dim}, which is dim, got {u.shape[1]}")
        u, v = as_float(u), as_float(v)
        with without_autocast(u.device.type):
            features = torch.cat([u, v, (u - v).abs()], 1)
            return torch.nn.functional.linear(features, self.classifier.weight.to(u.dtype))

    def forward(self, u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
        """Computes the loss of paired rows u, v (N, dim) with integer labels (N,)."""
        logits = self.logits(u, v)
        check_integers("labels", labels, u.shape[0], u.device)
        check_range("labels", labels, self.num_labels)
        return torch.nn.functional.cross_entropy(
            logits, labels.to(torch.int64), reduction=self.reduction
        )

    def extra_repr(self):
        return f"dim={self.dim}, num_labels={self.num_labels}"
