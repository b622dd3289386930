"""Several processes of one run: what they decide together."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training.prepare import Task
from fastsim.training.run import train
from tests import models
from tests.training.processes import run_together
from tests.training.runs import options


def train_apart(asked):
    """Train with metrics of this process's own; print those before and those that were logged."""
    import torch.distributed as dist

    evaluate = Task.evaluate

    def apart(self):
        # The first has ever worse ones, the second ever better.
        step = 0.1 * (1 + next(counted)) * (1 - 2 * (dist.get_rank() == 0))
        return dict.fromkeys(evaluate(self), 0.5 + step)

    counted = iter(range(99))
    Task.evaluate = apart
    result = train(asked)
    logged = [entry["eval_ndcg@10"] for entry in result["history"] if "eval_ndcg@10" in entry]
    print(json.dumps([result["steps"], next(counted), result["before"]["ndcg@10"], *logged]))


def train_late(asked):
    """Train where nothing can be written beside the output; the second process looks late."""
    import os

    import torch.distributed as dist

    from fastsim.training import checkpoints

    folder, mount = checkpoints.checkpoint_folder, os.path.ismount

    def late(*arguments):
        inside = Path(asked.output) / "checkpoints"
        while dist.get_rank() and not inside.exists():  # `run_together` ends what hangs
            time.sleep(0.01)
        return folder(*arguments)

    checkpoints.checkpoint_folder = late
    os.path.ismount = lambda path: str(path) == asked.output or mount(path)
    print(json.dumps(train(asked)["steps"]))


def test_all_processes_find_the_checkpoints_of_the_first(files, tmp_path):
    """It may have made their folder by the time that another looks for it."""
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", eval=held, max_steps=1)
    told = run_together(tmp_path, train_late, asked)
    assert [text.splitlines()[-1] for text in told] == ["1", "1"]


def test_the_metrics_of_the_first_process_are_those_of_all(files, tmp_path):
    """Of its own, each would choose another best model, and end at another step."""
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", eval=held, eval_steps=1, max_steps=3)
    told = run_together(tmp_path, train_apart, asked)
    # An older gloo says before it that it is connected.
    first, second = (json.loads(text.splitlines()[-1]) for text in told)
    assert first == second  # and all evaluated as often: none waited for the first
    assert first[2:] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def step_of_texts(folder, texts, shares, micro_batch_size):
    """Take a step on this process's share of texts; print the sum of squares of its gradients."""
    import torch
    import torch.distributed as dist

    from fastsim.encoders.encoder import Encoder
    from fastsim.grad_cache import GradCache
    from fastsim.losses import InfoNCE

    dist.init_process_group("gloo")
    encoder = Encoder.from_pretrained(folder)
    wrapped = torch.nn.parallel.DistributedDataParallel(encoder, find_unused_parameters=True)
    texts = texts[slice(*shares[dist.get_rank()])]
    loss = InfoNCE(group=dist.group.WORLD)

    def encode(part):
        return wrapped(encoder.tokenize(part))

    if micro_batch_size is None:
        vectors = encode(texts)
        value = loss(vectors, vectors.flip(1))
        value.backward()
    else:
        cache = GradCache(encode, lambda x: loss(x, x.flip(1)), micro_batch_size=micro_batch_size)
        value = cache.backward(texts)
    grads = [p.grad.double() for p in encoder.parameters() if p.grad is not None]
    print(json.dumps([value.item(), sum(grad.square().sum().item() for grad in grads)]))
    dist.destroy_process_group()


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_process_without_texts_takes_part(micro_batch_size, tmp_path):
    """The gradients are those of shares that all hold texts."""
    texts, found = models.texts(5), []
    for shares in ([(0, 5), (0, 0)], [(0, 2), (2, 5)]):
        given = str(models.tiny_bert()), texts, shares, micro_batch_size
        told = run_together(tmp_path, step_of_texts, *given)
        values, squares = zip(*(json.loads(text.splitlines()[-1]) for text in told), strict=True)
        assert squares[0] == squares[1]
        found.append((sum(values), squares[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
