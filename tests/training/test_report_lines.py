"""What a run says of itself beforehand, and that it does what it says."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import transformers

from fastsim.training import report_lines
from fastsim.training.counted import counted
from fastsim.training.report_lines import idle_gpus
from fastsim.training.run import train
from fastsim.training.trainer import Trainer
from tests.training.runs import options, stopped


def test_one_gpu_of_several_is_used(files, tmp_path, monkeypatch):
    """transformers would cut each batch, and with it the negatives, into parts."""
    made = transformers.TrainingArguments.__post_init__

    def with_two(self):
        made(self)
        assert self.device.type == "cpu"  # which decides their number, until it is said here
        self._n_gpu = 2

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", with_two)
    seen, step = [], Trainer.training_step

    def spied(self, model, *arguments):
        seen.append((self.args.n_gpu, type(model)))
        return step(self, model, *arguments)

    monkeypatch.setattr(Trainer, "training_step", spied)
    file, _ = files("tuples")
    train(options(tmp_path, file, loss="info_nce", max_steps=1))
    ((count, kind),) = seen
    assert count == 1
    assert not issubclass(kind, torch.nn.DataParallel)


def test_gpus_that_are_not_used_are_told(monkeypatch):
    gpu = torch.device("cuda", 0)
    for count, device, processes, idle in (
        (1, gpu, 1, False),
        (4, gpu, 4, False),
        (4, torch.device("cpu"), 1, False),
        (4, gpu, 1, True),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        found = idle_gpus(device, processes)
        said = (
            "4 GPUs are available, one is used; to use all: torchrun --nproc-per-node 4"
            " -m fastsim train"
        )
        assert found == (said if idle else None)


def test_one_of_a_thing_has_no_plural(files, tmp_path):
    assert counted(1, "process", "processes") == "1 process"
    assert [counted(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=1, micro_batch_size=1)
    said = []
    train(asked, said.append, dry_run=True)
    (batches,) = [line for line in said if line.startswith("batches")]
    assert batches.endswith("1 text encoded at a time; 1 step")


@pytest.mark.parametrize(
    ("kind", "loss", "more", "steps"),
    [
        ("tuples", "info_nce", {"batch_size": 8, "epochs": 0.5}, 3),  # of 2.5
        ("tuples", "info_nce", {"batch_size": 9, "epochs": 1.25}, 7),  # of 1.25 x 5
        ("tuples", "info_nce", {"batch_size": 8, "accumulate": 2, "epochs": 0.5}, 2),  # of 1.5
        ("tuples", "info_nce", {"batch_size": 64, "accumulate": 3, "epochs": 0.25}, 1),
        ("tuples", "info_nce", {"batch_size": 8, "epochs": 9, "max_steps": 2}, 2),
        ("labelled pairs", "classification", {"batch_size": 9, "epochs": 0.5}, 3),  # of 0.5 x 5
    ],
)
def test_as_many_steps_are_said_as_are_taken(kind, loss, more, steps, files, tmp_path):
    """A step that is begun is taken whole, and an epoch has a step for what is left over."""
    file, _ = files(kind)
    said = []
    found = train(options(tmp_path, file, loss=loss, **more), said.append)
    assert found["steps"] == steps
    (batches,) = [line for line in said if line.startswith("batches")]
    assert batches.endswith(f"; {counted(steps, 'step')}")


def test_lengths_of_the_first_rows_are_said_to_be_of_them(files, tmp_path, monkeypatch):
    file, _ = files("tuples")
    for looked_at, told in ((5, True), (10**6, False)):
        monkeypatch.setattr(report_lines, "_SAMPLED", looked_at)
        said = []
        train(options(tmp_path, file, loss="info_nce"), said.append, dry_run=True)
        (data,) = [line for line in said if line.startswith("data")]
        assert data.endswith(" at most in the first 5 rows") == told


@pytest.mark.parametrize(
    ("kind", "loss", "prompts", "told"),
    [
        ("labelled texts", "sup_con", {"text": "t: "}, "text"),
        ("scored pairs", "cosent", {"sentence1": "a: ", "sentence2": "b: "}, "sentence1 and sent"),
        ("tuples", "info_nce", {"anchor": "a: "}, None),
        ("scored pairs", "cosent", {}, None),
    ],
)
def test_prompts_that_a_search_will_not_use_are_told(kind, loss, prompts, told, files, tmp_path):
    file, _ = files(kind)
    said = []
    train(options(tmp_path, file, loss=loss, prompts=prompts), said.append, dry_run=True)
    lines = [line for line in said if line.startswith("prompts")]
    assert len(lines) == (told is not None)
    assert not lines or f"a search will not use the prompt of {told}" in lines[0]


def seconds_apart(monkeypatch, seconds=1):
    """The first step's line comes a second after the training began, the next a second later."""
    clock = itertools.count(step=seconds)
    monkeypatch.setattr(report_lines, "time", SimpleNamespace(monotonic=lambda: next(clock)))


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"batch_size": 64, "epochs": 1}, {1: 40}),
        ({"batch_size": 16, "epochs": 2}, {3: 40, 6: 80}),
        ({"batch_size": 8, "accumulate": 2, "epochs": 1}, {3: 40}),
        ({"batch_size": 8, "max_steps": 3}, {1: 8, 2: 16, 3: 24}),
        ({"batch_size": 32, "micro_batch_size": 5, "epochs": 1}, {2: 40}),
    ],
)
def test_rows_that_a_batch_lacks_are_not_counted(more, rows, files, tmp_path, monkeypatch):
    seconds_apart(monkeypatch)
    file, _ = files("tuples")
    said = []
    found = train(options(tmp_path, file, loss="info_nce", progress=True, **more), said.append)
    speeds = {
        int(step): int(speed)
        for step, speed in re.findall(r"step (\d+)/.* (\d+) rows/s", "\n".join(said))
    }
    assert {step: speeds[step] for step in rows} == {
        step: round(count / step) for step, count in rows.items()
    }
    speed = found["history"][-1]["train_samples_per_second"]
    assert speed == pytest.approx(rows[max(speeds)] / found["seconds"], abs=5.1e-4)


def test_a_slow_run_has_a_speed(files, tmp_path, monkeypatch):
    seconds_apart(monkeypatch, 60)
    file, _ = files("tuples")
    said = []
    asked = options(tmp_path, file, loss="info_nce", progress=True, batch_size=8, max_steps=1)
    train(asked, said.append)
    assert " 0.13 rows/s" in next(line for line in said if line.startswith("step 1/1"))


def test_steps_before_a_run_was_resumed_are_not_counted(files, tmp_path, monkeypatch):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", batch_size=16, epochs=2, progress=True)
    asked.logging_steps = 1
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "seconds", lambda self: 1000.0)
        stopped(asked, 3)
    seconds_apart(monkeypatch)
    said = []
    found = train(asked, said.append)
    (last,) = [line for line in said if line.startswith("step 6/6  loss")]
    assert " 13 rows/s" in last  # 40 in three seconds
    left = [re.search(r"(\d+) s left", line)[1] for line in said if re.match(r"step \d/6  ", line)]
    assert left == ["2", "1", "0"]  # at a second a step
    # The last entry is about the whole training.
    assert found["seconds"] > 1000
    speed = found["history"][-1]["train_samples_per_second"]
    assert speed == pytest.approx(80 / found["seconds"], abs=5.1e-4)
    speed = found["history"][-1]["train_steps_per_second"]
    assert speed == pytest.approx(6 / found["seconds"], abs=5.1e-4)
