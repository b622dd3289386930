"""What is given of pairs is refused with all the forms that are wanted."""

import pytest
import torch

import fastsim

X, GROUPS = torch.randn(4, 3), torch.arange(4)


@pytest.mark.parametrize("targets", [GROUPS, torch.tensor(1.0), torch.ones(4, 4, 1), "x", [GROUPS]])
def test_targets_are_two_vectors_or_a_matrix(targets):
    wanted = r"^targets: wanted \(row_groups, column_groups\) or a matrix \(N, M\), got "
    with pytest.raises(TypeError, match=wanted + type(targets).__name__):
        fastsim.siglip(X, X, targets)


@pytest.mark.parametrize("given", ["references", "reference_groups"])
def test_references_alone_are_named(given):
    alone = {given: {"references": X, "reference_groups": GROUPS}[given]}
    with pytest.raises(ValueError, match=f"wanted with .*, got {given} alone"):
        fastsim.hardest_pairs(X, GROUPS, **alone)
