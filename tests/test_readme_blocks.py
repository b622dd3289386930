"""The README's code blocks do what stands there: every one is run, in order, on small data.

Its two commands of installation and development are run by `.ci/run`.
"""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fastsim

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim import Encoder
from fastsim.cli.main import main
from fastsim.training import demo
from tests import models

ROOT = Path(fastsim.__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
OF_CI = ("pip install",)
# Of a machine with eight GPUs there are two processes here, and a batch that they can hold.
SMALLER = {
    "--nproc-per-node 8": "--standalone --nproc-per-node 2",
    "--batch-size 65536": "--batch-size 16",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    kept, held = demo.situations()
    for name, rows in (("train", kept[:8]), ("dev", held[:6]), ("test", held[:6])):
        with open(folder / f"{name}.csv", "w", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(["sentence1", "sentence2", "score"])
            writer.writerows(demo.pairs(rows))
    with open(folder / "pairs.csv", "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["anchor", "positive"])
        writer.writerows(row[:2] for row in kept[:16])
    (folder / "notes.txt").write_text("\n".join(row[0] for row in held) + "\n")
    Encoder.from_pretrained(str(models.tiny_bert())).save_pretrained(folder / "model")
    return folder


def run(block, folder):
    """In a shell; commands of ours alone in this process, which has imported what they import."""
    for ours, theirs in SMALLER.items():
        block = block.replace(ours, theirs)
    block = block.replace(
        "fastsim train", f"fastsim train --model {models.tiny_bert()} --overwrite"
    )
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    if all(command[0] == "fastsim" for command in commands):
        for command in commands:
            done = CliRunner().invoke(main, command[1:])
            assert done.exit_code == 0, f"{command}\n{done.output[-3000:]}{done.exception}"
        return
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-euo", "pipefail", "-c", block]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


COMMANDS = [text for kind, text in BLOCKS if kind == "bash" and not text.startswith(OF_CI)]
CODE = [text for kind, text in BLOCKS if kind == "python"]


def first_line(text):
    return next(line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("block", COMMANDS, ids=first_line)
def test_commands(block, place, monkeypatch):
    monkeypatch.chdir(place)
    run(block, place)


@pytest.fixture
def alone(tmp_path):
    """This process as a group of one."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("block", CODE, ids=first_line)
def test_code(block, place, alone, monkeypatch):
    for package in ("open_clip", "pytorch_metric_learning", "sentence_transformers"):
        if package in block:
            pytest.importorskip(package)
    monkeypatch.chdir(place)
    encoder = Encoder.from_pretrained(str(models.tiny_bert()))
    known = {
        "torch": torch,
        "fastsim": fastsim,
        "encoder": encoder,
        "optimizer": torch.optim.SGD(encoder.parameters(), lr=0.1),
        "queries": torch.randn(9, 6),
        "documents": torch.randn(9, 6),
    }
    if "GradCache" in block:
        before, _, after = block.partition("# one batch over")
        texts = {"query_texts": ["a", "b", "c"], "document_texts": ["d", "e", "f"]}
        exec(before, known | texts)
        exec(after.partition("\n")[2], known)
        return
    exec(block, known)
    if "# before:" in block:  # then the same after
        was = torch.nn.functional.cross_entropy(known["logits"], torch.arange(9))
        torch.testing.assert_close(known["loss"], was)


def test_every_block_is_run():
    kinds = {kind for kind, _ in BLOCKS}
    assert kinds == {"bash", "python"}
    assert len(COMMANDS) == 2
    assert len(BLOCKS) - len(COMMANDS) - len(CODE) == 2  # the two of CI
