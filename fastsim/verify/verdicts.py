"""Verdicts: whether a backend was right on a device, for a kind and a dtype, and how fast.

A verdict is a JSON file in the user's cache, under the digest of all that it depends on: device and
driver, versions, the sources and libraries that numbers come from, backend, kind, dtype, precision.
Change one of them and there is no verdict. Where the cache cannot be written, or the reason is one
that may pass (run.py), a verdict lasts as long as the process.
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
# Of the package what no number of a loss comes from.
WITHOUT_NUMBERS = {"benchmark", "cli", "encoders", "examples", "integrations", "training"}
# Of float32 products, as kernels tell them apart: exact, and TF32, which "medium" is too.
PRECISIONS = ("highest", "high")


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
    def may_be_taken(self):
        """Whether by this a kernel is right, and faster than the torch backend or not timed."""
        return self.served and (self.ratio is None or self.ratio < 1)

    @property
    def sentence(self):
        """For people."""
        if not self.served:
            return f"refused: {self.reason}"
        pace = "" if self.ratio is None else f", {self.ratio:.2f} times the torch backend's time"
        return f"right{pace}"


# ---- keys ----


def key(backend, kind, dtype, device, precision=None):
    """What a verdict depends on, as a dict of strings.

    precision: of `PRECISIONS`, or "" for other dtypes than float32; None: what torch is set to.
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
    """The precision of products of that dtype that torch is set to, as in a key."""
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
    """A digest of all that a backend's numbers come from."""
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in WITHOUT_NUMBERS
    ]
    files += (PACKAGE / "_lib").glob(f"{backend}.*")
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---- files ----


_unwritten = {}  # file name -> verdict, of those that no file has


def folder():
    """Where verdicts lie: FASTSIM_CACHE, else fastsim in the user's cache; None without a home."""
    if named := os.environ.get(CACHE):
        return Path(named) / "verdicts"
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return Path(cache) / "fastsim" / "verdicts"


def _name(of):
    digest = hashlib.blake2b(json.dumps(of, sort_keys=True).encode(), digest_size=12)
    return f"{digest.hexdigest()}.json"


def write(verdict, *, lasting=True):
    """Keeps a verdict, in this process alone where it is not `lasting`, or the cache cannot be
    written, which is said once.

    What ranks have agreed on stays: one that asked anew would wait for the others in vain.
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
        text = f"the verdicts on kernels are lost with this process: {error}; {CACHE}=folder"
        _tell(CACHE, f"{text} keeps them there")
    _count_change()
    for place in list(_known):
        if _fields(place) == {name: verdict.key[name] for name in _fields(place)}:
            del _known[place]


def _write(verdict, name):
    """OSError where the cache cannot be written."""
    home = folder()
    if home is None:
        raise OSError("there is no home folder")
    home.mkdir(parents=True, exist_ok=True)
    write_whole(home / name, json.dumps(dataclasses.asdict(verdict), indent=1))


def read(of):
    """The verdict of a key, or None; a file that is none counts as none."""
    home, name = folder(), _name(of)
    if home is None or name in _unwritten:  # which is later than any file
        return _unwritten.get(name)
    try:
        found = Verdict(**json.loads((home / name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == of else None


def everything():
    """All verdicts that are kept, those of other devices and versions too."""
    found, home = [], folder()
    for path in sorted(home.glob("*.json")) if home else ():
        try:
            found.append(Verdict(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return found


def current(backend, device):
    """Those that are kept on the kernels of a backend as they are now, on a device."""
    mine = [verdict for verdict in everything() if verdict.key["backend"] == backend]
    return [verdict for verdict in mine if is_current(verdict, device)]


def is_current(verdict, device):
    """Whether it is of a device, its driver, and the versions and kernels at hand."""
    of = verdict.key
    dtype = getattr(torch, of["dtype"])
    return of == key(of["backend"], of["kind"], dtype, device, of["precision"])


def now(served, reason, ratio, of):
    """A verdict of this moment."""
    return Verdict(served, reason, ratio, of, time.time())


# ---- what `auto` makes of them ----

_known = {}  # (backend, kind, dtype, device, precision) -> verdict or None
_told = set()
_changes = 0


def changes():
    """How often verdicts have changed in this process: what rests on older ones is to be redone."""
    return _changes


def _count_change():
    global _changes
    _changes += 1


def _fields(place):
    """What of a key a place of `_known` says, beside the device."""
    backend, kind, dtype, _, precision = place
    dtype = str(dtype).removeprefix("torch.")
    return {"backend": backend, "kind": kind, "dtype": dtype, "precision": precision}


def forget():
    """Reads the files anew; the ranks of a group agree anew, so all of them have to call this."""
    _count_change()
    _known.clear()
    _agreed.clear()


def verdict(backend, kind, dtype, device):
    """The verdict for that device, or None; read once in a process.

    With FASTSIM_VERIFY=1 one that is missing is made, but not under compilation or capture.
    """
    place = backend, kind, dtype, device, precision_of(dtype, device)
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


# Process group -> {(names, kind, dtype, device, precision): what its ranks agreed on}. By the group
# itself: a later one may have its name, and not its ranks.
_agreed = weakref.WeakKeyDictionary()
_NEVER = 1 << 40  # the ratio of kernels that must not be taken, in millionths


def agreed(names, kind, dtype, device, group):
    """As `fastest`, of all ranks of a process group: right on each, by the slowest rank.

    names: the same on every rank. The ranks wait for one another once for each kind and dtype; one
    that has failed by then says so in the same exchange.
    """
    precision = precision_of(dtype, device)
    place = *names, kind, dtype, device, precision
    agreed_on = _agreed.setdefault(group, {})
    if place not in agreed_on:
        found = [verdict(name, kind, dtype, device) for name in names]
        said = {"kind of loss": kind, "dtype": str(dtype), "kernels": ", ".join(names)}
        said["precision of float32 products"] = precision
        table = agree(group, said, [_millionths(v) for v in found], last=False)
        slowest = dict(zip(names, map(max, zip(*table, strict=True)), strict=True))
        best = min(slowest, key=slowest.get)
        agreed_on[place] = best if slowest[best] < _NEVER else None
    return agreed_on[place]


def _millionths(found):
    if found is None or not found.may_be_taken:
        return _NEVER
    return int(1e6 * (1.0 if found.ratio is None else found.ratio))


@constant_result
def fastest(names, kind, dtype, device):
    """Of backends that could serve a call the one that is right and fastest, or None.

    Says once for each device what would let `auto` take a kernel, and what a kernel was refused
    for.
    """
    found = {name: verdict(name, kind, dtype, device) for name in names}
    good = {name: v for name, v in found.items() if v is not None and v.may_be_taken}
    if good:
        return min(good, key=lambda name: good[name].ratio or 1.0)
    for name, of in found.items():
        if of is None:
            _tell(
                device,
                f"`auto` takes the torch backend on {device}: `fastsim verify --device {device}`"
                f" finds out whether {', '.join(names)} may be taken there, and is faster;"
                f" with --kind {kind} --dtype {str(dtype).removeprefix('torch.')} for such calls",
            )
        elif not of.served:
            _tell((device, name, kind), f"`auto` leaves {name} out for {kind}: {of.reason}")
    return None


def _tell(once, text):
    if once not in _told:
        _told.add(once)
        warnings.warn(text, stacklevel=2)
