"""What `fastsim info` shows: versions, backends, devices and the verdicts on their kernels."""

import platform
import sys
import time
from importlib import metadata

import numpy
import torch

import fastsim
from fastsim.backends import backends, get, pick
from fastsim.verify import verdicts


def facts():
    """What `fastsim info` shows, as a dictionary for JSON."""
    stored = verdicts.everything()
    return {
        "fastsim": fastsim.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "numpy": numpy.__version__,
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "backends": {
            name: f"usable{get(name).note()}" if reason is None else f"not usable: {reason}"
            for name, reason in backends().items()
        },
        "devices": [_device(device, stored) for device in devices()],
        "verdicts": None if (folder := verdicts.folder()) is None else str(folder),
    }


def devices():
    """The devices that torch can use."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found.append(torch.device(kind))
    return found


def _device(device, stored):
    """A device, the backend that `auto` takes there by default, and the verdicts on its kernels."""
    default = "cpu" if device.type == "cpu" and get("cpu").unsupported_reason() is None else "torch"
    model = verdicts.key("", "", torch.float16, device)["device"]
    return {
        "name": str(device),
        "what": model,
        "auto": default,
        "verdicts": [
            {
                **verdict.key,
                "served": verdict.served,
                "says": verdict.sentence,
                "days": round((time.time() - verdict.when) / 86400, 2),
                "current": verdicts.is_current(verdict, device),  # else `auto` ignores it
            }
            for verdict in stored
            if verdict.key["device"] == model
        ],
    }


def report():
    """The text of `fastsim info`."""
    known = facts()
    lines = [
        f"fastsim {known['fastsim']}",
        f"torch   {known['torch']} ({known['threads']} threads)",
        f"numpy   {known['numpy']}",
        f"python  {known['python']} on {known['machine']}",
        "",
        "backends",
    ]
    lines += [f"  {name:<7} {state}" for name, state in known["backends"].items()]
    lines.append(f"`auto` takes {pick(None, torch.empty(1)).name} for CPU tensors")
    for device in known["devices"]:
        if device["name"] != "cpu":
            lines += [
                "",
                f"{device['name']}: {device['what']}; `auto` takes {device['auto']} except for"
                f" verified kernels (fastsim verify --device {device['name']})",
            ]
        for verdict in device["verdicts"]:
            stale = "" if verdict["current"] else ", of other versions, not used"
            dtype = f"{verdict['dtype']} {verdict['precision']}"
            lines.append(
                f"  {verdict['backend']:<7} {verdict['kind']:<17} {dtype:<16}"
                f"{verdict['says']} ({verdict['days']:g} days old{stale})"
            )
    if warning := namesake():
        lines += ["", warning]
    return "\n".join(lines)


def namesake():
    """A warning if another project with the import name `fastsim` is installed too, else None."""
    try:
        version = metadata.version("fastsim")
    except metadata.PackageNotFoundError:
        return None
    return (
        "warning: another project (a vehicle model) with the same import name is installed too: the"
        f" distribution fastsim {version}. The two overwrite each other's files: uninstall both,"
        " then install fastsim-losses again"
    )
