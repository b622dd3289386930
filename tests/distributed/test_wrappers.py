"""Wrapped encoders reduce once a step; no rank waits for one that failed. See wrappers.py."""

import re

import pytest

from tests.distributed import work, wrappers

# float32: sums in another order. The limit of test_losses.py, which says the same of the losses.
ALLOWED = 1e-5
LIMIT = work.LIMIT.total_seconds()  # has passed where a rank waited in vain


@pytest.fixture(params=wrappers.RANKS)
def found(request, results):
    """What each process of a group of so many found."""
    return [rank["wrappers"][request.param] for rank in results[: request.param]]


@pytest.mark.parametrize("wrapper", ["ddp", "function_around_ddp", "fsdp", "deepspeed"])
def test_gradients_are_reduced_once_a_step(wrapper, found):
    """Unequal ranks, each with its own number of micro-batches."""
    for rank in found:
        error, reductions = rank[wrapper]
        assert error <= ALLOWED
        # FSDP2 reduces each of its two layers by itself.
        assert reductions == {"fsdp": 2}.get(wrapper, 1)


def test_a_matrix_against_the_columns_of_one_rank_is_refused(found):
    """It has as many columns as the rank: they would be taken for those of the first ranks."""
    for rank in found:
        said, seconds = rank["refusals"]["matrix of its own"]
        wanted = f"targets: wanted {4 * len(found)} columns, those of all ranks, got 4 on rank 0"
        assert wanted in said
        assert seconds < LIMIT


def test_a_rank_without_rows_takes_part(found):
    assert all(rank["no rows"] <= ALLOWED for rank in found)
    assert [rank["half without rows"] == 0 for rank in found] == [n == 1 for n in range(len(found))]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("temperature", "temperature: wanted"),
        ("positives", "positives: wanted"),
        ("exclude", "exclude\\[1\\]: wanted"),
        ("targets", "targets\\[1\\]: wanted"),
        ("matrix", "targets: wanted"),
        ("embeddings", "embeddings: wanted"),
        ("labels", "labels: wanted"),
        ("order", "targets: wanted targets that can be ordered"),
        ("levels", "levels: wanted distinct values in ascending order, got 0, 0"),
        ("encoder", "no such token"),
        ("columns", "columns\\[1\\]: wanted a tensor"),
        ("loss", "positives: wanted"),
        ("kernels", "embeddings: wanted"),
        ("kernels, later", "temperature: wanted"),
    ],
)
def test_a_refusal_on_one_rank_is_raised_on_all(name, reason, found):
    for number, rank in enumerate(found):
        said, seconds = rank["refusals"][name]
        assert re.search(reason, said), said
        assert seconds < LIMIT
        if number != 1:
            assert "rank 1" in said
        assert rank["refusals"]["after"] is True


@pytest.mark.parametrize("at", [2, 12], ids=["first pass", "second pass"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_an_encoder_that_fails_on_one_rank_is_told_to_all(wrapper, at, found):
    """Between the layers too, whose parameters FSDP2 gathers; from the first pass all go on."""
    for number, rank in enumerate(found):
        said, seconds, error = rank["failing"][wrapper, at]
        assert ("" if number == 1 else "rank 1: ") + "ValueError: no such layer" in said
        assert seconds < LIMIT
        assert error <= ALLOWED


def test_a_learnt_temperature_has_one_gradient(found):
    """Without DistributedDataParallel too: the mean over the ranks is that of one process."""
    for rank in found:
        for own, whole in rank["learnt"]:
            assert abs(own - whole) <= ALLOWED * abs(whole)
    first = [own for own, _ in found[0]["learnt"]]
    assert all([own for own, _ in rank["learnt"]] == first for rank in found)


def test_groups_are_copied_saved_and_meshes(found):
    for rank in found:
        assert rank["groups"] == [True, True, True]


def test_ranks_that_verify_kernels_of_different_losses_are_told(found):
    for rank in found:
        said, seconds = rank["refusals"]["kernels, other loss"]
        assert re.search("kind of loss: .* softmax on rank 0 and sigmoid on rank 1", said)
        assert seconds < LIMIT


def test_a_temperature_is_learnt_within_fsdp(found):
    assert all(rank["sharded with its loss"] <= ALLOWED for rank in found)


def test_a_sharded_loss_is_refused_by_grad_cache(found):
    assert all(
        re.match("ValueError: loss: wanted .* whole", rank["sharded loss"]) for rank in found
    )


@pytest.mark.parametrize("placement", wrappers.PLACEMENTS[::2], ids=str)
@pytest.mark.parametrize("name", wrappers.SHARDED)
def test_dtensors_are_the_whole_batch(name, placement, found):
    for rank in found:
        assert rank["dtensors"][name, str(placement)] <= ALLOWED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("columns", "anchors: wanted a DTensor of replicas, or one that is sharded by rows"),
        ("replica beside rows", "candidates: wanted .* sharded by rows, as anchors is"),
        ("plain beside rows", "candidates: .* got a plain tensor; x.full_tensor"),
        ("more columns", "anchors, candidates: wanted .* got 8 in anchors, 10 in candidates"),
        ("positives", "positives: cannot be combined with DTensors"),
        ("no group", "u: wanted a plain tensor, got a DTensor; x.full_tensor"),
        ("another group", "group: wanted None, or that of the mesh over which .* are sharded"),
        ("scores", "x: wanted a plain tensor, got a DTensor; x.full_tensor"),
    ],
)
def test_dtensors_that_cannot_be_served_are_refused(name, reason, found):
    for rank in found:
        assert re.search(reason, rank["dtensor refusals"][name]), rank["dtensor refusals"][name]
