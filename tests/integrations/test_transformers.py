"""What `log_metrics` logs of a trainer's steps against `fastsim.metrics` of the same batches."""

import pytest
import torch

import fastsim

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from fastsim.integrations.transformers import log_metrics  # noqa: E402

BATCH, STEPS, WIDTH = 6, 5, 8


class Model(torch.nn.Module):
    """InfoNCE of its rows as they are, so that its metrics do not change as it is trained."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        return {"loss": self.weight * fastsim.info_nce(x, y)}


class Evaluates(transformers.TrainerCallback):
    """Logs something else than the loss between steps, as an evaluation does."""

    def on_step_begin(self, args, state, control, **more):
        self.trainer.log({"eval_score": 1.0})


@pytest.fixture
def rows():
    return [{"x": torch.randn(WIDTH), "y": torch.randn(WIDTH)} for _ in range(BATCH * STEPS)]


@pytest.fixture
def trainer(rows, tmp_path):
    """One that logs every second step, the batches in order."""

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(rows, batch_size=BATCH)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    found = InOrder(model=Model(), args=arguments, train_dataset=rows)
    found.remove_callback(transformers.PrinterCallback)
    found.add_callback(Evaluates())
    found.callback_handler.callbacks[-1].trainer = found
    return found


def logged(trainer, prefix):
    """What the log of each pair of steps says, and whether another entry says anything."""
    entries = [
        {name.removeprefix(prefix): v for name, v in entry.items() if name.startswith(prefix)}
        for entry in trainer.state.log_history
    ]
    pairs = zip(trainer.state.log_history, entries, strict=True)
    losses = [found for entry, found in pairs if "loss" in entry]
    return losses, sum(map(bool, entries)) > sum(map(bool, losses))


def wanted(rows):
    """The metrics of the first and of the second pair of steps."""
    for start in (0, 2 * BATCH):
        with fastsim.metrics() as found:
            for at in (start, start + BATCH):
                batch = rows[at : at + BATCH]
                fastsim.info_nce(*(torch.stack([row[side] for row in batch]) for side in "xy"))
        yield pytest.approx(found.read())


@pytest.mark.parametrize("options", [{}, {"prefix": "train/"}])
def test_an_entry_covers_the_steps_since_the_last(options, rows, trainer):
    """In a second run too, which does not count what the first one has not logged."""
    log_metrics(trainer, **options)
    for _ in range(2):
        trainer.train()
        assert logged(trainer, options.get("prefix", "batch_")) == ([*wanted(rows)], False)


def test_nothing_is_logged_where_no_score_is_observed(trainer):
    log_metrics(trainer)
    with fastsim.use_backend("eager"):
        trainer.train()
    assert logged(trainer, "batch_") == ([{}, {}], False)


def test_nothing_is_observed_in_a_compiled_model(trainer):
    log_metrics(trainer)
    trainer.args.torch_compile = True  # after the trainer was made: nothing is compiled
    trainer.train()
    assert logged(trainer, "batch_") == ([{}, {}], False)
