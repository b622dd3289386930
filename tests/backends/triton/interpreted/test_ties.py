"""Copies of a row tie, wherever they stand: the cases of tests/test_ties.py."""

import pytest
import torch

from tests import test_ties as ties


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_copy_is_not_above_its_positive(similarity, either_way, request, usable):
    case = ties.test_a_copy_is_not_above_its_positive
    case("triton", torch.float32, similarity, None, request, usable)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_copy_among_own_negatives_is_not_above_its_positive(similarity, usable):
    case = ties.test_a_copy_among_own_negatives_is_not_above_its_positive
    case("triton", torch.float32, similarity, usable)


def test_the_closest_negative_is_a_copy(either_way, request, usable):
    ties.test_the_closest_negative_is_a_copy("triton", torch.float32, None, request, usable)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_a_copy_is_no_farther_than_its_positive(distance, usable):
    case = ties.test_a_copy_is_no_farther_than_its_positive
    case("triton", torch.float32, distance, usable)
