"""Several processes of one run: what they decide together."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training.prepare import Task
from fastsim.training.run import train
from tests.training.processes import run_together
from tests.training.runs import options


def train_apart(asked):
    """Train with metrics of this process's own, and print those that were logged."""
    import torch.distributed as dist

    evaluate = Task.evaluate

    def apart(self):
        # The first has ever worse ones, the second ever better.
        step = 0.1 * next(counted) * (1 - 2 * (dist.get_rank() == 0))
        return dict.fromkeys(evaluate(self), 0.5 + step)

    counted = iter(range(99))
    Task.evaluate = apart
    result = train(asked)
    logged = [entry["eval_ndcg@10"] for entry in result["history"] if "eval_ndcg@10" in entry]
    print(json.dumps([result["steps"], *logged]))


def test_the_metrics_of_the_first_process_are_those_of_all(files, tmp_path):
    """Of its own, each would choose another best model, and end at another step."""
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", eval=held, eval_steps=1, max_steps=3)
    told = run_together(tmp_path, train_apart, asked)
    # An older gloo says before it that it is connected.
    first, second = (json.loads(text.splitlines()[-1]) for text in told)
    assert first == second
    assert first[1:] == pytest.approx([0.4, 0.3, 0.2])
