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

    warmup, steps: the number of steps of the warm-up and of the whole training. Returns a line if
    the warm-up is longer than the training, else None.
    """
    from transformers import get_scheduler

    try:
        scheduler = get_scheduler(
            name, _optimizer(learning_rate), num_warmup_steps=warmup, num_training_steps=steps
        )
        factors = getattr(scheduler, "lr_lambdas", ())
        for factor_at in factors:
            factor_at(steps)  # transformers computes the rate after the last step too
    except ValueError as error:
        raise ValueError(f"schedule: {name}: {error}") from error
    except ZeroDivisionError:
        raise ValueError(
            f"warmup: wanted fewer steps than the {steps} of the training for schedule {name!r},"
            f" got {warmup}"
        ) from None
    # A schedule without a warm-up begins at its peak.
    if warmup > steps and any(factor_at(0) == 0 for factor_at in factors):
        return (
            f"warmup: the training ends after {steps:,} of {warmup:,} steps of warm-up, before the"
            " learning rate is at its peak"
        )
    return None


def _optimizer(rate):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
