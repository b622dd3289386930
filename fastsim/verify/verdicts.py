"""Verdicts: whether a backend was right on a device, for a kind and a dtype, and how fast.

A verdict is a JSON file in the user's cache, under the digest of all that it depends on: device and
driver, versions, the kernels' sources and libraries, backend, kind, dtype, precision. Change one of
them and there is no verdict.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
import warnings
from pathlib import Path

import torch

from fastsim.agreement import agree
from fastsim.operators import constant_result

PACKAGE = Path(__file__).parents[1]
CACHE, ASK = "FASTSIM_CACHE", "FASTSIM_VERIFY"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """served: whether it may be taken. reason: why not, a sentence. ratio: its time over that of
    the torch backend, None where it was not timed. key: what it depends on. when: seconds.
    """

    served: bool
    reason: str | None
    ratio: float | None
    key: dict
    when: float

    @property
    def sentence(self):
        """For people."""
        if not self.served:
            return f"refused: {self.reason}"
        pace = "" if self.ratio is None else f", {self.ratio:.2f} times the torch backend's time"
        return f"right{pace}"


# ---- keys ----


def key(backend, kind, dtype, device):
    """What a verdict depends on, as a dict of strings."""
    return {
        **_of_device(torch.device(device)),
        "kernels": _kernels(backend),
        "backend": backend,
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "precision": torch.get_float32_matmul_precision() if dtype == torch.float32 else "",
    }


@functools.cache
def _of_device(device):
    versions = {"torch": torch.__version__, "triton": _triton()}
    if device.type != "cuda":
        return {"device": device.type, "capability": "", "driver": "", **versions}
    properties = torch.cuda.get_device_properties(device)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": f"{torch.version.hip or torch.version.cuda} {driver}",
        **versions,
    }


def _triton():
    from importlib import metadata

    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-windows"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def _kernels(backend):
    """A digest of all that a backend's numbers come from."""
    folders = (PACKAGE / "backends", PACKAGE / "kinds", PACKAGE / "engine")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    files += (PACKAGE / "_lib").glob(f"{backend}.*")
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- files ----


def folder():
    """Where verdicts lie: FASTSIM_CACHE, else fastsim in the user's cache."""
    named = os.environ.get(CACHE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(named) if named else Path(cache) / "fastsim") / "verdicts"


def _path(of):
    digest = hashlib.blake2b(json.dumps(of, sort_keys=True).encode(), digest_size=12)
    return folder() / f"{digest.hexdigest()}.json"


def write(verdict):
    """Keeps a verdict; a reader sees the file before or after, never a part of it."""
    path = _path(verdict.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(dataclasses.asdict(verdict), indent=1))
    part.replace(path)
    forget()
    return path


def read(of):
    """The verdict of a key, or None; a file that is none counts as none."""
    try:
        found = Verdict(**json.loads(_path(of).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == of else None


def everything():
    """All verdicts that are kept, those of other devices and versions too."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            found.append(Verdict(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return found


def now(served, reason, ratio, of):
    """A verdict of this moment."""
    return Verdict(served, reason, ratio, of, time.time())


# ---- what `auto` makes of them ----

_known = {}  # (backend, kind, dtype, device, precision) -> verdict or None
_told = set()


def forget():
    """Reads the files anew."""
    _known.clear()
    _agreed.clear()


def verdict(backend, kind, dtype, device):
    """The verdict for that device, or None; read once in a process.

    With FASTSIM_VERIFY=1 one that is missing is made, but not under compilation or capture.
    """
    place = backend, kind, dtype, device, torch.get_float32_matmul_precision()
    if place not in _known:
        of = key(backend, kind, dtype, device)
        found = read(of)
        if found is None and os.environ.get(ASK) == "1":
            if _traced(device):
                return None  # which a later call may ask again
            from fastsim.verify.run import verify

            found = verify(backend, kind, dtype, device)
        _known[place] = found
    return _known[place]


def _traced(device):
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()


_agreed = {}  # (group, names, kind, dtype, device) -> what its ranks agreed on
_NEVER = 1 << 40  # the ratio of kernels that must not be taken, in millionths


def agreed(names, kind, dtype, device, group):
    """As `fastest`, of all ranks of a process group: right on each, by the slowest rank.

    names: the same on every rank. The ranks wait for one another once for each kind and dtype; one
    that has failed by then says so in the same exchange.
    """
    place = group.group_name, *names, kind, dtype, device
    if place not in _agreed:
        found = [verdict(name, kind, dtype, device) for name in names]
        said = {"kind of loss": kind, "dtype": str(dtype), "kernels": ", ".join(names)}
        table = agree(group, said, [_millionths(v) for v in found], last=False)
        slowest = dict(zip(names, map(max, zip(*table, strict=True)), strict=True))
        best = min(slowest, key=slowest.get)
        _agreed[place] = best if slowest[best] <= 10**6 else None
    return _agreed[place]


def _millionths(found):
    if not found or not found.served:
        return _NEVER
    return int(1e6 * (1.0 if found.ratio is None else found.ratio))


@constant_result
def fastest(names, kind, dtype, device):
    """Of backends that could serve a call the one that is right and fastest, or None.

    Says once for each device what would let `auto` take a kernel, and what a kernel was refused
    for.
    """
    found = {name: verdict(name, kind, dtype, device) for name in names}
    good = {n: v for n, v in found.items() if v and v.served and (v.ratio is None or v.ratio < 1)}
    if good:
        return min(good, key=lambda name: good[name].ratio or 1.0)
    for name, of in found.items():
        if of is None:
            _tell(
                device,
                f"`auto` takes the torch backend on {device}: `fastsim verify --device {device}`"
                f" finds out whether {', '.join(names)} may be taken there, and is faster",
            )
        elif not of.served:
            _tell((device, name, kind), f"`auto` leaves {name} out for {kind}: {of.reason}")
    return None


def _tell(once, text):
    if once not in _told:
        _told.add(once)
        warnings.warn(text, stacklevel=2)
