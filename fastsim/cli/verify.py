"""`fastsim verify`: which kernels are correct on a device, and how fast."""

import click
import torch

from fastsim.backends import backends, get
from fastsim.training.counted import counted
from fastsim.verify import run


def checkable(device, chosen):
    """(names of the backends that can be checked on the device, why the others cannot).

    chosen: names of backends; empty: all of those that need a verdict.
    """
    names, reasons = [], []
    for name in backends():
        if not get(name).by_verdict or (chosen and name not in chosen):
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
        wanted = "wanted the name of a device in torch, such as cuda:0"
        raise ValueError(f"--device: {wanted}, got {name!r}") from error


def lines(device, backend=(), kinds=(), dtypes=(), jobs=None):
    """Checks kinds of loss and dtypes and yields the lines of the report; empty: all of them.

    jobs: checks at a time, by default as many as cores and memory allow. ClickException if nothing
    can be checked, so that a script does not take that for success.
    """
    device = _device(device)
    for kind in kinds:
        if kind not in run.KINDS:
            raise ValueError(f"--kind: wanted one of {', '.join(run.KINDS)}, got {kind!r}")
    dtypes = [getattr(torch, dtype) for dtype in dtypes] or run.DTYPES
    names, reasons = checkable(device, backend)
    yield from (f"not checked: {reason}" for reason in reasons)
    checks = [*run.checks_of(device, names, kinds or run.KINDS, dtypes)]
    if not checks:
        raise click.ClickException(
            f"nothing was checked: none of the chosen kernels can run on {str(device)!r}"
        )
    jobs = min(jobs or run.most_at_once(device), len(checks))
    yield f"{counted(len(checks), 'check')}, {jobs} at a time"
    for verdict in run.verdicts_of(checks, jobs):
        key = verdict.key
        precision = f" ({key['precision']})" if key["precision"] else ""
        yield f"{key['backend']:<7} {key['kind']:<17} {key['dtype']}{precision}: {verdict.sentence}"
