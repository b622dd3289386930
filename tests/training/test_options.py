"""What `Options` takes: types by their annotations, ranges, and what JSON can hold."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training.options import Options
from fastsim.training.run import train
from tests import models
from tests.training.runs import options

GIVEN = {"train": "a", "output": "b", "loss": "cosent"}


def test_paths_and_numbers_of_other_libraries_are_trained_with_and_written(files, tmp_path):
    file, held = (Path(name) for name in files("tuples"))
    asked = options(
        tmp_path,
        [file, str(file)],
        eval=held,
        model=Path(models.tiny_bert()),
        output=tmp_path / "out",
        checkpoints=tmp_path / "kept",
        loss="info_nce",
        loss_options={"temperature": torch.tensor(0.125), "symmetric": np.True_},
        batch_size=np.int64(8),
        epochs=np.float32(0.5),
        max_steps=torch.tensor(1),
        seed=np.uint8(3),
    )
    result = train(asked)
    written = json.loads((tmp_path / "out/fastsim_training.json").read_text())
    assert written["options"] == result["options"] == asked.as_written()
    assert written["options"]["train"] == [str(file), str(file)]
    assert written["options"]["eval"] == str(held)
    assert written["options"]["checkpoints"] == str(tmp_path / "kept")
    assert written["options"]["loss_options"] == {"temperature": 0.125, "symmetric": True}
    assert (written["options"]["batch_size"], written["options"]["epochs"]) == (8, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("train", 3, "train: wanted a text or a path, or a list of them, got int"),
        ("train", ["a", None], "train: wanted a text or a path, or a list of them, got NoneType"),
        ("output", b"out", "output: wanted a text or a path, got bytes"),
        ("loss", None, "loss: wanted a text, got NoneType"),
        ("report_to", ["wandb"], "report_to: wanted a text, got list"),
        ("epochs", "3", "epochs: wanted a number, got str"),
        ("epochs", None, "epochs: wanted a number, got NoneType"),
        ("learning_rate", True, "learning_rate: wanted a number, got bool"),
        ("seed", "3", "seed: wanted an int, got str"),
        ("batch_size", 32.5, "batch_size: wanted an int, got float"),
        ("max_steps", 10.0, "max_steps: wanted an int, got float"),
        ("score_range", (0, "5"), r"score_range: wanted two numbers, \(low, high\), got \(0, '5'"),
        ("score_range", 5, r"score_range: wanted two numbers, \(low, high\), got 5"),
        ("learn", "scale", "learn: wanted a list of texts, got str"),
        ("matryoshka", 8, "matryoshka: wanted a list of ints, got int"),
        ("matryoshka", (8, 4.0), "matryoshka: wanted an int, got float"),
        ("prompts", "q: ", "prompts: wanted a dictionary, got str"),
        ("prompts", {"query": 1}, "prompts: query: wanted a text, got int"),
        ("loss_options", {1: 2}, "loss_options: wanted names that are texts, got 1"),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(name, value, reason):
    with pytest.raises(TypeError, match=f"^{reason}"):
        Options(**GIVEN | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("train", [], "train: wanted at least one file, got none"),
        ("resume", "yes", "resume: wanted one of False, True, got 'yes'"),
        ("header", 3, "header: wanted one of False, True, got 3"),
        ("matryoshka", (8, 0), "matryoshka: wanted at least 1, got 0"),
        (
            "loss_options",
            {"scale": torch.nn.Parameter(torch.tensor(2.0))},
            r"loss_options: scale: wanted a number, .*; learn=\('scale',\) learns it",
        ),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(name, value, reason):
    with pytest.raises(ValueError, match=f"^{reason}"):
        Options(**GIVEN | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("output", Path("out")), ("loss_options", {"scale": torch.ones(2)}), ("prompts", {"a": {1}})],
)
def test_what_could_not_be_written_at_the_end_is_refused_at_the_start(name, value, tmp_path):
    """The options may be changed after they were made."""
    asked, said = options(tmp_path, "no such file"), []
    setattr(asked, name, value)
    with pytest.raises(TypeError, match=f"^{name}: wanted what JSON can hold, got "):
        train(asked, said.append)
    assert said == []
