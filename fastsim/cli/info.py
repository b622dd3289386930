"""What this installation has: versions, backends, devices and the verdicts on their kernels."""

import json
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
    """All that `fastsim info` knows, as JSON takes it."""
    kept = verdicts.everything()
    return {
        "fastsim": fastsim.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "numpy": numpy.__version__,
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "backends": {
            name: f"usable{get(name).note()}" if reason is None else f"not here: {reason}"
            for name, reason in backends().items()
        },
        "devices": [_device(device, kept) for device in devices()],
        "verdicts": None if (folder := verdicts.folder()) is None else str(folder),
    }


def devices():
    """The devices that torch sees here."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for kind in ("mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found.append(torch.device(kind))
    return found


def _device(device, kept):
    """A device, what `auto` takes there by default, and the verdicts on its kernels."""
    default = "cpu" if device.type == "cpu" and get("cpu").unsupported_reason() is None else "torch"
    here = verdicts.key("", "", torch.float16, device)["device"]
    mine = [verdict for verdict in kept if verdict.key["device"] == here]
    return {
        "name": str(device),
        "what": here,
        "auto": default,
        "verdicts": [
            {
                **verdict.key,
                "served": verdict.served,
                "says": verdict.sentence,
                "days": round((time.time() - verdict.when) / 86400, 2),
                "current": verdicts.is_current(verdict, device),  # else `auto` does not look at it
            }
            for verdict in mine
        ],
    }


def as_json():
    """`facts` as text."""
    return json.dumps(facts(), indent=1)


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
    lines.append(f"on CPU tensors `auto` takes {pick(None, torch.empty(1)).name}")
    for device in known["devices"]:
        if device["name"] != "cpu":
            lines += [
                "",
                f"{device['name']}: {device['what']}; without a good verdict `auto` takes"
                f" {device['auto']} (fastsim verify --device {device['name']})",
            ]
        for verdict in device["verdicts"]:
            stale = "" if verdict["current"] else ", of other versions: not used"
            dtype = f"{verdict['dtype']} {verdict['precision']}"
            lines.append(
                f"  {verdict['backend']:<7} {verdict['kind']:<17} {dtype:<16}"
                f"{verdict['says']} ({verdict['days']:g} days old{stale})"
            )
    if warning := namesake():
        lines += ["", warning]
    return "\n".join(lines)


def namesake():
    """A sentence where another project of the import name is installed too, else None."""
    try:
        version = metadata.version("fastsim")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"warning: the distribution fastsim {version} is installed too. It is another project (a"
        " vehicle model) with the same import name, and the two overwrite each other's files:"
        " uninstall both, then install fastsim-losses again"
    )
