"""README.md and bench/README.md say what the result files say, and no figure beside."""

import re

import pytest

import fastsim

pytest.importorskip("matplotlib", reason="the figures need matplotlib")

from bench.figures import SOURCE, source
from bench.report import MARKED, PAGES, README, RESULTS, filled

PICTURE = re.compile(r"!\[[^]]+\]\(((?:bench/)?results/([^/]+)/[^)]+\.png)\)")
# A number with a unit of time, memory, speed or share: something that was measured.
FIGURE = re.compile(r"\d\s?(?:ms|s|seconds|MB|GB|[GT]FLOP/s|x|%)(?![\w/])")
# A link to a file of the repository.
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")
ROOT = README.parent
FOLDERS = ("bench", "fastsim", "fastsim/integrations", "fastsim/training", "csrc", "tests")


def test_tables_are_those_of_the_result_files():
    assert MARKED.search(RESULTS.read_text())
    for page in PAGES:
        text = page.read_text()
        assert filled(text) == text, page


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "bench/README.md"])
def test_no_figure_stands_outside_the_tables(page):
    text = MARKED.sub("", page.read_text())
    assert not FIGURE.findall(text), FIGURE.findall(text)
    assert FIGURE.findall("takes 12 ms, 1.7 x, 40 MB and 3% of 2 TFLOP/s") == [
        *("2 ms", "7 x", "0 MB", "3%", "2 TFLOP/s")
    ]


@pytest.mark.parametrize("page", PAGES, ids=["README.md", "bench/README.md"])
def test_pictures_are_drawn_from_the_result_files(page):
    from PIL import Image

    pictures = PICTURE.findall(page.read_text())
    assert pictures
    for path, folder in pictures:
        with Image.open(page.parent / path) as image:
            assert image.text[SOURCE] == source(folder), path


def test_the_readme_is_short_and_names_every_loss():
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    for name in fastsim.__all__:
        assert re.search(rf"\b{name}\b", text), name


def test_the_table_of_memory_names_every_loss():
    page = (ROOT / "fastsim/README.md").read_text()
    section = page.partition("\n## Memory\n")[2].partition("\n## ")[0]
    for name in fastsim.losses.__all__:
        if name.islower() and not name.endswith("_from_scores"):
            assert re.search(rf"\b{name}`", section), name


def test_every_page_is_linked_and_links_to_what_is_there():
    text = README.read_text()
    for folder in FOLDERS:
        assert f"({folder}/README.md)" in text, folder
    for page in (README, *(ROOT / folder / "README.md" for folder in FOLDERS)):
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
