"""The README says what the result files say, and no figure beside."""

import re
from pathlib import Path

import pytest

import fastsim

pytest.importorskip("matplotlib", reason="the figures need matplotlib")

from bench.figures import SOURCE, source
from bench.report import MARKED, README, filled

PICTURE = re.compile(r"!\[[^]]+\]\((bench/results/([^/]+)/[^)]+\.png)\)")
# A number with a unit of time, memory, speed or share: something that was measured.
FIGURE = re.compile(r"\d\s?(?:ms|s|seconds|MB|GB|[GT]FLOP/s|x|%)(?![\w/])")


def test_tables_are_those_of_the_result_files():
    text = README.read_text()
    assert MARKED.search(text)
    assert filled(text) == text


def test_no_figure_stands_outside_the_tables():
    text = MARKED.sub("", README.read_text())
    assert not FIGURE.findall(text), FIGURE.findall(text)
    assert FIGURE.findall("takes 12 ms, 1.7 x, 40 MB and 3% of 2 TFLOP/s") == [
        *("2 ms", "7 x", "0 MB", "3%", "2 TFLOP/s")
    ]


def test_pictures_are_drawn_from_the_result_files():
    from PIL import Image

    pictures = PICTURE.findall(README.read_text())
    assert pictures
    for path, folder in pictures:
        with Image.open(Path(README).parent / path) as image:
            assert image.text[SOURCE] == source(folder), path


def test_every_loss_is_in_the_readme():
    text = README.read_text()
    for name in fastsim.__all__:
        assert re.search(rf"\b{name}\b", text), name
