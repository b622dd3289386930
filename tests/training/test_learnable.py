"""Data that a loss cannot learn from are refused before anything is written."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training.data import DataError
from fastsim.training.formats import format_of
from fastsim.training.learnable import check_learnable
from fastsim.training.run import train
from tests.training.runs import options

SCORED = [{"sentence1": "a", "sentence2": f"b{i}", "score": 1} for i in range(4)]
LABELS = [{"text": f"t{i}", "label": i} for i in range(5)]
PAIRS = [{"anchor": f"a{i}", "positive": f"p{i}"} for i in range(5)]
CANNOT = {
    "equal scores": ("cosent", SCORED, "score: wanted .*, got 1 in all 4 rows"),
    "one row": ("angle", SCORED[:1], "rows: wanted at least 2 for angle"),
    "labels once": ("sup_con", LABELS, "label: wanted a label with at least two texts"),
    "one label": ("siglip", [row | {"label": 1} for row in LABELS], "two different labels"),
    "one text": ("info_nce", [row | {"anchor": "a"} for row in PAIRS], "no row has a negative"),
    "no company": ("info_nce", PAIRS, "batch_size: wanted at least 2 for info_nce"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_learnt_is_refused(case, tmp_path):
    loss, rows, reason = CANNOT[case]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = 1 if case == "no company" else 8
    with pytest.raises(ValueError, match=reason):
        train(options(tmp_path, str(file), loss=loss, batch_size=size))
    assert not (tmp_path / "out").exists()


def test_a_batch_needs_as_many_rows_as_the_loss_compares():
    """Two for an order of pairs, also of a cross-encoder; one where a row has its own negative."""

    def check(loss, columns, rows, size, *, cross=False):
        texts = [f"text {row}" for row in range(rows)]
        layout = format_of(columns)
        values = None if layout.label is None else [float(row) for row in range(rows)]
        check_learnable(loss, values, lambda name: texts, layout, size, cross=cross)

    scored, pairs = ("sentence1", "sentence2", "score"), ("anchor", "positive")
    for loss, columns, cross in (
        ("cosent", scored, False),
        ("cosent", scored, True),
        ("info_nce", pairs, False),
    ):
        check(loss, columns, 2, 2, cross=cross)
        with pytest.raises(DataError, match=f"rows: wanted at least 2 for {loss}.*got 1"):
            check(loss, columns, 1, 2, cross=cross)
        with pytest.raises(DataError, match=f"batch_size: wanted at least 2 for {loss}.*got 1"):
            check(loss, columns, 2, 1, cross=cross)
    check("regression", scored, 1, 1, cross=True)
    check("cosine_regression", scored, 1, 1)
    check("info_nce", (*pairs, "negative"), 1, 1)
