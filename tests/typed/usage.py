"""The public surface as a user calls it, for mypy in its strict mode (see pyproject.toml).

Not run: mypy finds an argument or a result that has no type, or another than is written here.
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import fastsim
from fastsim import losses

x, y = torch.randn(4, 8), torch.randn(6, 8)
groups, labels = torch.arange(4), torch.randn(4)

assert_type(fastsim.cosine_similarity(x, y), Tensor)
assert_type(fastsim.paired_cosine_similarity(x, x), Tensor)
assert_type(fastsim.top_k(x, y, 3), tuple[Tensor, Tensor])
assert_type(fastsim.info_nce(x, y, temperature=torch.tensor(0.05), symmetric=True), Tensor)
assert_type(fastsim.info_nce(x, y, exclude=(groups, torch.arange(6)), reduction="none"), Tensor)
assert_type(fastsim.sup_con(x, groups, y, torch.arange(6)), Tensor)
assert_type(fastsim.nt_xent(x, groups), Tensor)
assert_type(fastsim.multi_similarity(x, groups), Tensor)
assert_type(fastsim.siglip(x, y, (groups, torch.arange(6)), scale=10.0, bias=-10.0), Tensor)
assert_type(fastsim.matrix_cross_entropy(x, y, None), Tensor)
assert_type(fastsim.matrix_mse(x, y, torch.ones(4, 6)), Tensor)
assert_type(fastsim.cosent_matrix(x, None, torch.ones(4, 4)), Tensor)
assert_type(fastsim.full_triplet(x, y, mining="hard"), Tensor)
assert_type(fastsim.mean_negative(x, y), Tensor)
assert_type(fastsim.closest_negative(x, y), tuple[Tensor, Tensor])
assert_type(fastsim.batch_hard_triplet(x, groups, distance="cosine"), Tensor)
assert_type(fastsim.cosent(labels, groups), Tensor)
assert_type(fastsim.angle(x, x, labels), Tensor)
assert_type(fastsim.angle_similarity(x, x), Tensor)
assert_type(fastsim.triplet_margin(x, x, x), Tensor)
assert_type(fastsim.cosine_regression(x, x, labels), Tensor)
assert_type(fastsim.backends(), dict[str, str | None])
with fastsim.use_backend("eager"):
    pass

module = losses.InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.1)), symmetric=True)
assert_type(module.forward(x, y), Tensor)
nested = losses.Matryoshka(module, [8, 4], weights=[1.0, 0.5])
assert_type(nested.forward(x, y), Tensor)
classifier = losses.SoftmaxClassification(8, 3)
assert_type(classifier.logits(x, x), Tensor)
