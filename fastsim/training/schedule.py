"""Checks of the learning-rate schedule of transformers, before anything is read or removed."""

import torch


def check_schedule(name):
    """Refuse a schedule that transformers does not have, or that needs further arguments."""
    from transformers import get_scheduler

    try:
        get_scheduler(name, _optimizer(1.0), num_warmup_steps=1, num_training_steps=2)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"schedule: wanted a schedule of transformers, got {name!r}: {error}"
        ) from error


def check_rates(name, learning_rate, warmup, steps):
    """Refuse a learning rate or a warm-up that the schedule does not support.

    warmup, steps: the number of steps of the warm-up and of the whole training.
    """
    from transformers import get_scheduler

    try:
        scheduler = get_scheduler(
            name, _optimizer(learning_rate), num_warmup_steps=warmup, num_training_steps=steps
        )
        for factor_at in getattr(scheduler, "lr_lambdas", ()):
            factor_at(steps)  # transformers computes the rate after the last step too
    except ValueError as error:
        raise ValueError(f"schedule: {name}: {error}") from error
    except ZeroDivisionError:
        raise ValueError(
            f"warmup: wanted fewer steps than the {steps} of the training for schedule {name!r},"
            f" got {warmup}"
        ) from None


def warmup_note(name, warmup, steps):
    """A line for a warm-up that is longer than the training, or None.

    warmup, steps: as in `check_rates`.
    """
    from transformers import get_scheduler

    given = {"num_warmup_steps": warmup, "num_training_steps": steps}
    factors = getattr(get_scheduler(name, _optimizer(1.0), **given), "lr_lambdas", [])
    if warmup <= steps or not factors or factors[0](0) > 0:  # a schedule without a warm-up
        return None
    return (
        f"warmup: the training ends after {steps:,} of {warmup:,} steps of warm-up, before the"
        " learning rate is at its peak"
    )


def _optimizer(rate):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
