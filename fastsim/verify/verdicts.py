"""Verdicts: whether a backend was correct on a device, for a kind and a dtype, and how fast.

A verdict is a JSON file in the user's cache, named by a digest of all that it depends on: device
and driver, versions, the sources and libraries that compute, backend, kind, dtype, precision. If
one of them changes, there is no verdict. If the cache cannot be written, or the reason may be
transient (run.py), a verdict lasts as long as the process.
"""

import dataclasses
import functools
import hashlib
import json
import os
import time
import warnings
import weakref
from pathlib import Path

import torch

from fastsim.agreement import agree
from fastsim.backends.triton import installed
from fastsim.files import write_whole
from fastsim.operators import constant_result
from fastsim.precision import float32_products
from fastsim.verify import driver

PACKAGE = Path(__file__).parents[1]
CACHE, ASK = "FASTSIM_CACHE", "FASTSIM_VERIFY"
# The folders of the package that take no part in computing a loss.
NOT_COMPUTING = {"benchmark", "cli", "encoders", "examples", "integrations", "training"}
# Precisions of float32 products that kernels distinguish: exact, and TF32 (also for "medium").
PRECISIONS = ("highest", "high")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check.

    served: whether the kernel is correct. reason: why not, as a sentence. ratio: its time divided
    by that of the torch backend, None if it was not timed. key: what the verdict depends on. when:
    seconds since the epoch.
    """

    served: bool
    reason: str | None
    ratio: float | None
    key: dict
    when: float

    @property
    def may_be_taken(self):
        """Whether the kernel is correct, and faster than the torch backend or not timed."""
        return self.served and (self.ratio is None or self.ratio < 1)

    @property
    def sentence(self):
        """The verdict in words."""
        if not self.served:
            return f"refused: {self.reason}"
        time_ = "" if self.ratio is None else f", {self.ratio:.2f} times the torch backend's time"
        return f"correct{time_}"


# ---- keys ----


def key(backend, kind, dtype, device, precision=None):
    """What a verdict depends on, as a dict of strings.

    precision: one of `PRECISIONS`, or "" for other dtypes than float32; None: torch's setting.
    """
    return {
        **_of_device(torch.device(device)),
        "kernels": _kernels(backend),
        "backend": backend,
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "precision": precision_of(dtype, device) if precision is None else precision,
    }


def precision_of(dtype, device):
    """The precision of products of this dtype by torch's setting, as in a key."""
    if dtype != torch.float32:
        return ""
    return PRECISIONS[float32_products(torch.device(device).type) != PRECISIONS[0]]


@functools.cache
def _of_device(device):
    versions = {"torch": torch.__version__, "triton": installed.version()}
    if device.type != "cuda":
        return {"device": device.type, "capability": "", "driver": "", **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": f"{torch.version.hip or torch.version.cuda} {driver.version()}",
        **versions,
    }


@functools.cache
def _kernels(backend):
    """A digest of the sources and libraries of a backend."""
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in NOT_COMPUTING
    ]
    files += (PACKAGE / "_lib").glob(f"{backend}.*")
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- files ----


_unwritten = {}  # file name -> verdict that is not in a file


def folder():
    """The folder of verdicts: in FASTSIM_CACHE or the user's cache; None without a home folder."""
    if named := os.environ.get(CACHE):
        return Path(named) / "verdicts"
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return Path(cache) / "fastsim" / "verdicts"


def _name(key):
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12)
    return f"{digest.hexdigest()}.json"


def write(verdict, *, lasting=True):
    """Keep a verdict in a file; only in this process if not `lasting` or if the cache fails.

    If the cache cannot be written, a warning says so once. What ranks have agreed on is kept: a
    rank that asked again would wait for the others forever.
    """
    name = _name(verdict.key)
    _unwritten.pop(name, None)
    try:
        if lasting:
            _write(verdict, name)
        else:
            _unwritten[name] = verdict
    except OSError as error:
        _unwritten[name] = verdict
        text = f"verdicts on kernels cannot be saved and are lost with this process: {error}"
        _warn_once(CACHE, f"{text}; {CACHE}=FOLDER saves them in another folder")
    _count_change()
    for call in list(_known):
        if _fields(call) == {name: verdict.key[name] for name in _fields(call)}:
            del _known[call]


def _write(verdict, name):
    """OSError if the cache cannot be written."""
    home = folder()
    if home is None:
        raise OSError("there is no home folder")
    home.mkdir(parents=True, exist_ok=True)
    write_whole(home / name, json.dumps(dataclasses.asdict(verdict), indent=1))


def read(key):
    """The verdict of a key, or None; unreadable files are ignored."""
    home, name = folder(), _name(key)
    if home is None or name in _unwritten:  # newer than any file
        return _unwritten.get(name)
    try:
        verdict = Verdict(**json.loads((home / name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return verdict if verdict.key == key else None


def everything():
    """All verdicts in files, including those of other devices and versions."""
    verdicts, home = [], folder()
    for path in sorted(home.glob("*.json")) if home else ():
        try:
            verdicts.append(Verdict(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return verdicts


def current(backend, device):
    """The verdicts in files on the current kernels of a backend, on a device."""
    of_backend = [verdict for verdict in everything() if verdict.key["backend"] == backend]
    return [verdict for verdict in of_backend if is_current(verdict, device)]


def is_current(verdict, device):
    """Whether a verdict is of this device, its driver, and the current versions and kernels."""
    fields = verdict.key
    dtype = getattr(torch, fields["dtype"])
    return fields == key(fields["backend"], fields["kind"], dtype, device, fields["precision"])


def now(served, reason, ratio, key):
    """A verdict with the current time."""
    return Verdict(served, reason, ratio, key, time.time())


# ---- the choice of `auto` ----

_known = {}  # (backend, kind, dtype, device, precision) -> verdict or None
_warned = set()
_changes = 0


def changes():
    """How often verdicts have changed in this process; choices made before are outdated."""
    return _changes


def _count_change():
    global _changes
    _changes += 1


def _fields(call):
    """The fields of a key, except the device, that an entry of `_known` has."""
    backend, kind, dtype, _, precision = call
    dtype = str(dtype).removeprefix("torch.")
    return {"backend": backend, "kind": kind, "dtype": dtype, "precision": precision}


def forget():
    """Read the files again. The ranks of a group agree again, so all of them have to call this."""
    _count_change()
    _known.clear()
    _agreed.clear()


def verdict(backend, kind, dtype, device):
    """The verdict for a device, or None; read once per process.

    With FASTSIM_VERIFY=1 a missing verdict is made, except under compilation or graph capture.
    """
    call = backend, kind, dtype, device, precision_of(dtype, device)
    if call not in _known:
        result = read(key(backend, kind, dtype, device))
        if result is None and os.environ.get(ASK) == "1":
            if _traced(device):
                return None  # not remembered: a later call may make the verdict
            from fastsim.verify.run import verify

            result = verify(backend, kind, dtype, device)
        _known[call] = result
    return _known[call]


def _traced(device):
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()


# Process group -> {(names, kind, dtype, device, precision): the backend its ranks agreed on}. The
# key is the group itself, since another group may later have the same name.
_agreed = weakref.WeakKeyDictionary()
_NEVER = 1 << 40  # the ratio, in millionths, of kernels that must not be used


def agreed(names, kind, dtype, device, group):
    """As `fastest` for all ranks of a group: correct on each, and fastest on the slowest rank.

    names: the same on every rank. The ranks wait for each other once per kind and dtype; a rank
    that has failed reports it in the same exchange.
    """
    precision = precision_of(dtype, device)
    call = *names, kind, dtype, device, precision
    agreed_on = _agreed.setdefault(group, {})
    if call not in agreed_on:
        verdicts = [verdict(name, kind, dtype, device) for name in names]
        same = {"kind of loss": kind, "dtype": str(dtype), "kernels": ", ".join(names)}
        same["precision of float32 products"] = precision
        table = agree(group, same, [_millionths(v) for v in verdicts], last=False)
        slowest = dict(zip(names, map(max, zip(*table, strict=True)), strict=True))
        best = min(slowest, key=slowest.get)
        agreed_on[call] = best if slowest[best] < _NEVER else None
    return agreed_on[call]


def _millionths(result):
    """The ratio of a verdict in millionths, as an int that ranks can exchange."""
    if result is None or not result.may_be_taken:
        return _NEVER
    return int(1e6 * (1.0 if result.ratio is None else result.ratio))


@constant_result
def fastest(names, kind, dtype, device):
    """The fastest of these backends that is correct and faster than the torch backend, or None.

    Warns once per device how to verify kernels, and once per kernel why it was refused.
    """
    verdicts = {name: verdict(name, kind, dtype, device) for name in names}
    usable = {name: v for name, v in verdicts.items() if v is not None and v.may_be_taken}
    if usable:
        return min(usable, key=lambda name: usable[name].ratio or 1.0)
    for name, result in verdicts.items():
        if result is None:
            dtype_name = str(dtype).removeprefix("torch.")
            _warn_once(
                device,
                f"`auto` takes the torch backend on {device}: there is no verdict yet on"
                f" {', '.join(names)}, which may be faster; run `fastsim verify --device {device}`,"
                f" or only for such calls with --kind {kind} --dtype {dtype_name}",
            )
        elif not result.served:
            text = f"`auto` does not use {name} for {kind}: {result.reason}"
            _warn_once((device, name, kind), text)
    return None


def _warn_once(key, text):
    """key: identifies the warning."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, stacklevel=2)
