"""Losses over process groups against one process with everything; see ranks.py."""

import inspect
import re

import pytest
import torch

import fastsim
from tests.distributed import ranks, work

# float32: as asked for; float64: what a few thousand roundings leave.
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}


def allowed(case, dtype):
    """The error of an exponential is that of its logit, which `circle` makes `gamma` times a score.

    Other losses have scales near 1 here, which the few thousand roundings cover.
    """
    circle = inspect.unwrap(case.loss) is inspect.unwrap(fastsim.circle)
    sharp = circle and dtype == torch.float64
    return ALLOWED[dtype] * (case.loss.__kwdefaults__["gamma"] if sharp else 1)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("count", ranks.RANKS)
@pytest.mark.parametrize("case", ranks.BATCHWISE, ids=repr)
def test_ranks_together_are_one_process(case, count, exchange, results):
    """With unequal ranks, and where one has no rows or no columns either."""
    wanted = [way for way in ranks.ways(case, count) if way[0] == exchange]
    if not wanted:
        pytest.skip(f"no {exchange}")
    for rank in results[:count]:
        for way in wanted:
            error = rank["errors"][(case.name, count, *way)]
            assert error <= allowed(case, way[2]), way


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("case", ranks.BATCHWISE, ids=repr)
def test_ranks_together_see_one_batch(case, exchange, results):
    if exchange not in [way[0] for way in ranks.ways(case, 3)]:
        pytest.skip(f"no {exchange}")
    found = [rank["seen"][case.name, exchange] for rank in results[:3]]
    for error, numbers in found:
        assert error <= ALLOWED[torch.float64]
        unseen = "hardest_pairs", "cosent", "angle", "late_interaction", "distill"
        unseen = *unseen, *(f"batch_{name}_triplet" for name in ("hard", "semi_hard", "all"))
        assert bool(numbers) != (inspect.unwrap(case.loss).__name__ in unseen)


def test_a_group_of_some_processes_is_a_batch_of_its_own(results):
    for rank in work.OTHERS:
        found = results[rank]["others"]
        assert len(found) == 6
        assert max(found.values()) <= ALLOWED[torch.float64], found


def test_documents_may_be_longer_on_one_rank_than_on_another(results):
    """Each is padded to the longest of its rank, as a tokenizer does."""
    assert all(rank["lengths"] <= ALLOWED[torch.float64] for rank in results[:3])


def test_every_loss_with_a_group_is_there():
    public = {**vars(fastsim.losses), **vars(fastsim)}.values()
    functions = [value for value in public if hasattr(value, "__kwdefaults__")]
    wanted = {inspect.unwrap(f) for f in functions if "group" in (f.__kwdefaults__ or {})}
    assert {inspect.unwrap(case.loss) for case in ranks.BATCHWISE} == wanted
    assert len(wanted) >= 18


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("width", "width: wanted the same on every rank .* got (6,) on rank 0 and (7,) on rank 1"),
        ("temperature", "temperature: .* got 0.1 on rank 0 and 1.1 on rank 1"),
        ("learnt", "temperature: .* got 0.1.* on rank 0 and 1.1.* on rank 1"),
        ("loss", "loss: .* got 'info_nce' on rank 0 and 'siglip' on rank 1"),
        ("symmetric", "symmetric: .* got True on rank 0 and False on rank 1"),
        ("dtype", "dtype: .* got torch.float32 on rank 0 and torch.float16 on rank 1"),
        ("exchange", "exchange: .* got 'gather' on rank 0 and 'ring' on rank 1"),
        ("targets", "targets: .* on rank 0 and None on rank 1"),
        ("exclude", "exclude: .* got None on rank 0 and .*torch.int64"),
        ("gradient", "gradient of rows: .* got True on rank 0 and False on rank 1"),
        (
            "gradient of columns",
            "gradient of columns: .* got True on rank 0 and False on rank 1",
        ),
        ("no gradients", "gradients enabled: .* got True on rank 0 and False on rank 1"),
        ("metrics", "metrics: .* on rank 1"),
        ("nt_xent", "temperature: .* got 0.1 on rank 0 and 1.1 on rank 1"),
        ("multi_similarity", "beta: .* got 9.0 on rank 0 and 10.0 on rank 1"),
        ("batch_hard_triplet", "soft: .* got True on rank 0 and False on rank 1"),
        ("hardest_pairs", "distance: .* got 'euclidean' on rank 0 and 'cosine' on rank 1"),
        ("references", "references: .* got None on rank 0 and a tensor .* on rank 1"),
        ("own first", "own_first: .* got True on rank 0 and False on rank 1"),
        ("largest_group", "largest_group: .* got 5 on rank 0 and 6 on rank 1"),
        ("labels", "labels: .* torch.int64 on rank 0 and a tensor of torch.float32 on rank 1"),
        ("levels", "levels: .* got None on rank 0 and 2 on rank 1"),
        ("ring of texts", "group: wanted a process group, .* got a Ring"),
        ("ring of triplets", "group: wanted a process group, .* got a Ring"),
    ],
)
def test_ranks_that_differ_are_refused(name, said, results):
    pattern = said.replace("(", r"\(").replace(")", r"\)")
    for rank in results:
        assert re.match(pattern, rank["refusals"][name])
        assert rank["refusals"]["after"] is True


@pytest.mark.parametrize("name", ["slow", "dead"])
def test_a_rank_that_does_not_answer_fails_the_others(name, results):
    """Within the time of their own group, which is less than that of all."""
    for rank in results[:-1]:
        said, seconds = rank[name]
        assert said != "no error"
        assert seconds < work.LIMIT.total_seconds()
