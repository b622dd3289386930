"""`fastsim verify`: which kernels are right on a device, and how fast."""

import click
import torch

from fastsim.backends import backends, get
from fastsim.training.counted import counted
from fastsim.verify import run


def candidates(device, wanted):
    """(names of the backends to be checked on the device, sentences why others are not)."""
    names, reasons = [], []
    for name in backends():
        if not get(name).by_verdict or (wanted and name not in wanted):
            continue
        try:
            reason = get(name).unsupported_reason(torch.empty(1, device=device))
        except (RuntimeError, AssertionError) as error:  # torch sees no such device
            reason = str(error).splitlines()[0]
        if reason is None:
            names.append(name)
        else:
            reasons.append(f"{name}: {reason}")
    return names, reasons


def _device(name):
    try:
        return torch.device(name)
    except RuntimeError as error:
        wanted = "wanted a device as torch names it, such as cuda:0"
        raise ValueError(f"--device: {wanted}, got {name!r}") from error


def lines(device, wanted=(), kinds=(), dtypes=(), jobs=None):
    """What is said while kinds of loss and dtypes are checked; without names, all of them.

    jobs: checks at once, by default as many as the machine has the means for. ClickException where
    nothing can be checked: a script is not to take that for kernels that are right.
    """
    device = _device(device)
    for kind in kinds:
        if kind not in run.KINDS:
            raise ValueError(f"--kind: wanted one of {', '.join(run.KINDS)}, got {kind!r}")
    asked = kinds or run.KINDS, [getattr(torch, dtype) for dtype in dtypes] or run.DTYPES
    names, reasons = candidates(device, wanted)
    yield from (f"not checked: {reason}" for reason in reasons)
    checks = [*run.checks_of(device, names, *asked)]
    if not checks:
        raise click.ClickException(
            f"nothing was checked: no kernel that was asked for can run on {str(device)!r}"
        )
    jobs = min(jobs or run.most_at_once(device), len(checks))
    yield f"{counted(len(checks), 'check')}, {jobs} at once"
    for verdict in run.verdicts_of(checks, jobs):
        of = verdict.key
        precision = f" ({of['precision']})" if of["precision"] else ""
        yield f"{of['backend']:<7} {of['kind']:<17} {of['dtype']}{precision}: {verdict.sentence}"
