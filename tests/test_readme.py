"""The README says what the result files say."""

import re

import fastsim
from bench.report import MARKED, README, filled


def test_tables_are_those_of_the_result_files():
    text = README.read_text()
    assert MARKED.search(text)
    assert filled(text) == text


def test_every_loss_is_in_the_readme():
    text = README.read_text()
    for name in fastsim.__all__:
        assert re.search(rf"\b{name}\b", text), name
