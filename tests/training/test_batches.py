"""Batches: full, every row once, equal texts apart, the same for the same seed and epoch."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from datasets import Dataset

from fastsim.encoders.encoder import Encoder
from fastsim.training import batch_plan
from fastsim.training.assignment import Assignment
from fastsim.training.batches import SharedBatches, SharedRows, StandIn, UniqueBatches
from fastsim.training.collator import Collator
from fastsim.training.data import read_data
from fastsim.training.formats import format_of
from fastsim.training.links import LinkedBatches, LinkedRows
from tests import models
from tests.seeds import fresh


def random_rows(seed, rows=300, vocabulary=150, width=2):
    generator = fresh(seed)
    return torch.randint(vocabulary, (rows, width), generator=generator).tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 7, 32])
def test_batches_hold_every_row_once(seed, size, share):
    rows = random_rows(seed)
    batches = UniqueBatches(rows, size, seed=seed, share=share)
    for epoch in range(3):
        batches.set_epoch(epoch)
        found = list(batches)
        assert len(found) == len(batches)
        assert sorted(row for batch in found for row in batch) == list(range(len(rows)))
        if share:
            assert sorted(map(len, found))[1:] == [size] * (math.ceil(len(rows) / size) - 1)
        if not share or size < 32:  # with 32 rows to a batch some texts cannot be dealt apart
            assert twice(found, rows) == 0


def twice(batches, rows):
    """How many rows share a batch with an earlier row of an equal text."""
    return sum(
        count - 1
        for batch in batches
        for count in Counter(text for row in batch for text in set(rows[row])).values()
    )


def frequent_anchor():
    return [("hub" if row < 500 else f"a{row}", f"p{row}") for row in range(2000)]


def mined_hubs():
    return [(f"a{row}", f"p{row}", f"h{row % 20}") for row in range(2000)]


@pytest.mark.parametrize("rows", [frequent_anchor, mined_hubs])
def test_a_frequent_text_costs_no_batch(rows):
    rows = rows()
    found = list(UniqueBatches(rows, 128))
    assert sorted(map(len, found)) == [2000 - 15 * 128] + [128] * 15
    hubs = [sum(rows[row][0] == "hub" for row in batch) for batch in found]
    assert max(hubs) - min(hubs) <= 1  # dealt apart as far as it goes


def test_sick_pairs_fill_their_batches():
    folder = models.real_data() / "sick"
    columns = "anchor=sentence_A,positive=sentence_B,together=entailment_judgment"
    dataset, _ = read_data(folder / "SICK_train.txt", columns=columns, kind="tsv")
    rows = [(a, b) for a, b, kind in (r.values() for r in dataset) if kind == "ENTAILMENT"]
    assert len(rows) == 1299
    assert sorted(map(len, UniqueBatches(rows, 1024))) == [275, 1024]
    assert twice(UniqueBatches(rows, 32), rows) == 0


def test_without_sharing_full_batches_come_first():
    rows = frequent_anchor()
    batches = UniqueBatches(rows, 100, share=False)
    found = list(batches)
    assert twice(found, rows) == 0
    sizes = sorted(map(len, found), reverse=True)
    assert sizes[:15] == [100] * 15
    assert len(found) == 500
    assert batches.small_count() == 480


def test_without_sharing_an_epoch_may_need_fewer_batches_or_more():
    """Then it has those of the first epoch. About a quarter of the data here has such epochs."""
    for seed in range(15):
        batches = UniqueBatches(random_rows(seed, rows=24, vocabulary=12), 4, share=False)
        for epoch in range(12):
            batches.set_epoch(epoch)
            found = list(batches)
            assert len(found) == len(batches)
            assert sorted(row for batch in found for row in batch) == list(range(24))


@pytest.mark.parametrize("seed", range(4))
def test_without_sharing_a_row_goes_into_the_first_batch_that_it_fits_in(seed):
    rows, size = random_rows(seed, rows=60, vocabulary=25), 4
    batches = UniqueBatches(rows, size, share=False)
    wanted = []
    for row in range(60):
        texts = set(rows[row])
        fits = (
            batch
            for batch in wanted
            if len(batch) < size and all(texts.isdisjoint(rows[other]) for other in batch)
        )
        batch = next(fits, None)
        if batch is None:
            wanted.append(batch := [])
        batch.append(row)
    assert batches._first_fit(list(range(60)), []) == wanted


def test_a_text_that_a_row_holds_twice_counts_once():
    """In neighbouring columns or not: the row itself is no other row with the text."""
    for row in (("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a"), ("a", "a", "a")):
        assert UniqueBatches([row, ("c", "d", "e")], 2).max_uses == 1
        assert UniqueBatches([row, ("c", "d", "a")], 2).max_uses == 2


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_text_change_places(seed):
    """The row that comes has the text of the one that leaves. One way alone keeps all apart."""
    texts = [(0, 1), (0, 2), (1, 3), (2, 4)]
    assignment = Assignment(4, 2, texts.__getitem__, fresh(seed))
    for row in (0, 3, 1, 2):
        assignment.add([row])
    assert assignment.separate() == []
    assert sorted(map(sorted, assignment.batches())) == [[0, 3], [1, 2]]


def test_a_text_that_has_a_label_many_times_costs_no_batch():
    """Its copies are no negatives of each other, so that they may share one."""
    texts = ["a"] * 9 + list("bcdefgh")
    dataset = Dataset.from_dict({"text": texts, "label": [0] * 9 + [1] * 7})
    batches = batch_plan.batch_plan(dataset, format_of(["text", "label"]), "sup_con", 4)
    assert [len(batch) for batch in batches] == [4] * 4


def test_texts_are_numbered_part_by_part(monkeypatch):
    """Equal texts have one number, in whatever parts and columns they are."""
    texts = ["a", "b", "c", "a", "d", "b", "e", "f"]
    dataset = Dataset.from_dict({"anchor": texts, "positive": texts[::-1]})
    monkeypatch.setattr(batch_plan, "_PART", 3)
    numbers = batch_plan.text_numbers(dataset, ("anchor", "positive"))
    known = dict(zip(texts, numbers[:, 0].tolist(), strict=True))
    assert len(set(known.values())) == len(set(texts))
    assert numbers.tolist() == [[known[row["anchor"]], known[row["positive"]]] for row in dataset]


def test_links_name_what_is_no_negative():
    rows = [("a", "p"), ("a", "q"), ("b", "q"), ("c", "r", "p"), ("d", "s", "x"), ("e", "e2", "c")]
    rows = [(*row, *["x"] * (3 - len(row))) for row in rows]
    sampler = UniqueBatches(rows, 6)
    ((*batch,),) = LinkedBatches(sampler, sampler.numbers)
    link = {row: links[0] for row, links in batch}
    negative = {row: links[1] for row, links in batch}
    assert link[0] == link[1] == link[2]
    assert len({link[row] for row in (0, 3, 4, 5)}) == 4
    assert negative == {0: -1, 1: -1, 2: -1, 3: link[0], 4: -1, 5: link[3]}
    sampler = UniqueBatches(rows[3:5], 2)
    assert [links for _, links in next(iter(LinkedBatches(sampler, sampler.numbers)))] == [None] * 2
    sampler = UniqueBatches([("a", "p", "x"), ("b", "q", "p")], 2)  # one is the other's negative
    links = dict(next(iter(LinkedBatches(sampler, sampler.numbers))))
    assert links[0][1] == -1
    assert links[1][1] == links[0][0] != links[1][0]


@pytest.mark.parametrize("negatives", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_excluded_is_what_belongs_together(seed, negatives):
    """By the links of a batch, as the loss gets them."""
    columns = ["anchor", "positive", "negative", "negative_2"][: 2 + negatives]
    numbers = torch.randint(24, (60, len(columns)), generator=fresh(seed)).numpy()
    rows = [dict(zip(columns, map(str, row), strict=True)) for row in numbers.tolist()]

    class Encoder:
        def tokenize(self, texts, prompt):
            return texts

        def prompt_of_column(self, name):
            return ""

    collate, excluded = Collator(Encoder(), format_of(columns)), 0
    for batch in LinkedBatches(UniqueBatches(numbers, 12, seed=seed), numbers):
        taken = LinkedRows(Dataset.from_list(rows)).__getitems__(batch)
        assert [{name: row[name] for name in columns} for row in taken] == [
            rows[row] for row, _ in batch
        ]
        found = collate(taken)
        candidates = [row[name] for name in columns[1:] for row in taken]
        groups = together([(row["anchor"], row["positive"]) for row in taken])
        wanted = [[text in groups[row["anchor"]] for text in candidates] for row in taken]
        if "exclude" in found:
            own, other = found["exclude"]
            same = own[:, None] == other[None, :]
        else:  # all but the row's own positive are negatives
            same = torch.eye(len(taken), len(candidates), dtype=torch.bool)
        assert same.tolist() == wanted
        excluded += int(same.sum()) - len(taken)
    assert excluded > 0


def together(pairs):
    """{text: the texts that pairs join with it, directly or through others}."""
    groups = {text: {text} for pair in pairs for text in pair}
    for one, other in pairs:
        joined = groups[one] | groups[other]
        groups |= dict.fromkeys(joined, joined)
    return groups


def test_batches_without_repeats_are_full():
    batches = UniqueBatches([(i,) for i in range(64)], 16)
    assert [len(batch) for batch in batches] == [16] * 4


def test_batches_depend_on_seed_and_epoch_alone():
    rows = random_rows(0)
    one, two = UniqueBatches(rows, 8, seed=3), UniqueBatches(rows, 8, seed=3)
    one.set_epoch(5)
    first = list(one)
    two.set_epoch(4)
    assert list(two) != first
    two.set_epoch(5)
    assert list(two) == first
    other = UniqueBatches(rows, 8, seed=4)
    other.set_epoch(5)
    assert list(other) != first


def test_batches_bring_groups_together():
    groups = [row // 5 for row in range(200)]
    batches = UniqueBatches([(row,) for row in range(200)], 16, groups=groups)
    for batch in batches:
        assert len(batch) <= 16
        sizes = Counter(groups[row] for row in batch)
        assert max(sizes.values()) >= 2
    assert sorted(row for batch in batches for row in batch) == list(range(200))


@pytest.mark.parametrize("size", [4, 5, 16])
def test_batches_hold_a_topic(size):
    topics = [row // 4 for row in range(198)]  # the last has two rows
    batches = UniqueBatches([(row,) for row in range(198)], size, topics=topics)
    found = list(batches)
    assert sorted(row for batch in found for row in batch) == list(range(198))
    whole = [
        batch for batch in found for t, n in Counter(topics[r] for r in batch).items() if n > 3
    ]
    # Topics are taken apart only to fill what no whole one fits in.
    assert len(whole) >= (198 // size) * (size // 4) * 0.9
    if size == 4:
        assert all(len({topics[row] for row in batch}) == 1 for batch in found)


def test_large_topics_make_batches_of_their_own():
    topics = ["a"] * 64 + ["b"] * 32
    batches = UniqueBatches([(row,) for row in range(96)], 16, topics=topics)
    assert (
        sorted({topics[row] for row in batch} == {"a"} for batch in batches)
        == [False] * 2 + [True] * 4
    )


def test_a_group_stays_together_within_its_topic():
    topics = ["a"] * 48 + ["b"] * 48
    groups = [row // 2 for row in range(96)]
    batches = UniqueBatches([(row,) for row in range(96)], 16, topics=topics, groups=groups)
    for batch in batches:
        assert len({topics[row] for row in batch}) == 1
        assert set(Counter(groups[row] for row in batch).values()) == {2}


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_batches_of_few_rows_and_one_text(rows):
    texts = [("same", i) for i in range(rows)]
    assert sorted(map(len, UniqueBatches(texts, 4, share=False))) == [1] * rows
    assert sum(map(len, UniqueBatches(texts, 4))) == rows
    groups = UniqueBatches([(i % 2,) for i in range(rows)], 4, groups=[0] * rows)
    assert len(list(groups)) == len(groups)
    assert all(groups)


def test_batches_are_shared_by_processes():
    rows = random_rows(2)
    whole = UniqueBatches(rows, 16)
    parts = [SharedBatches(UniqueBatches(rows, 16), rank, 3) for rank in range(3)]
    for epoch in (0, 3):
        for sampler in (whole, *parts):
            sampler.set_epoch(epoch)
        for batch, *shares in zip(whole, *parts, strict=True):
            assert [row for share in shares for row in share] == batch
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_without_a_row_gets_one_for_its_encoder_alone():
    columns = {"anchor": ["a", "a"], "positive": ["b", "c"]}
    data = SharedRows(LinkedRows(Dataset.from_dict(columns)))
    collate = Collator(Encoder.from_pretrained(models.tiny_bert()), format_of(columns))
    texts, got = np.array([[0, 1], [0, 2]]), []
    for rank in range(3):
        whole = LinkedBatches(UniqueBatches(texts, 16), texts)
        (share,) = SharedBatches(whole, rank, 3)
        batch = collate(data.__getitems__(share))
        assert [len(part["input_ids"]) for part in batch["features"]] == [1, 1]
        got.append((isinstance(share, StandIn), batch.get("rows"), *map(len, batch["exclude"])))
    assert got == [(True, 0, 0, 0), (False, None, 1, 1), (False, None, 1, 1)]


def test_a_loss_of_single_rows_takes_a_small_batch_in_every_process():
    texts = random_rows(2, rows=5)
    for rank in range(3):
        shares = SharedBatches(UniqueBatches(texts, 3), rank, 3, whole=True)
        assert sorted(map(len, shares)) == [1, 2]
        (small,) = (rows for rows in shares if len(rows) == 2)
        assert small == next(rows for rows in UniqueBatches(texts, 3) if len(rows) == 2)


def test_batches_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="batch_size: wanted at least 1, got 0"):
        UniqueBatches([("a",)], 0)
    with pytest.raises(ValueError, match="wanted at least one row"):
        UniqueBatches([], 2)


def test_hubs_cost_no_long_search(monkeypatch):
    """Where many texts are in more rows than there are batches, few rows are looked at twice."""
    searches = []
    exchange = Assignment._exchange
    monkeypatch.setattr(
        Assignment,
        "_exchange",
        lambda self, row, *more: searches.append(row) or exchange(self, row, *more),
    )
    rows = [(f"hub {row % 30}", f"p{row}") for row in range(3000)]
    sizes = sorted(map(len, UniqueBatches(rows, 300)))
    assert sizes == [300] * 10
    assert len(searches) <= 4 * 30
