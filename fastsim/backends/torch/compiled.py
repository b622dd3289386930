"""The steps between the products through torch.compile.

A panel is then read or written a few times, where single operations do so ten times. That is done
on GPUs with Triton, of panels so large that the seconds of a compilation come back.
FASTSIM_COMPILE=0 turns it off; FASTSIM_COMPILE=1 asks for it for every panel, on a CPU too. What
does not compile is done by single operations from then on, which is said once.

One compilation serves every shape and every number: sizes are symbols, numbers are tensors.
"""

import functools
import os
import types
import warnings

import torch

from fastsim.backends.torch import panels
from fastsim.backends.torch.block import FusibleBlock
from fastsim.backends.triton import installed
from fastsim.operators import traced
from fastsim.tile import Tile

VARIABLE = "FASTSIM_COMPILE"
DEVICES = ("cuda", "xpu")
COMPILER = "inductor"

# The fields of a block and of a tile that the compiled function is given; others it is made for.
TENSORS = (
    *("positives", "row_ids", "column_ids", "row_groups", "column_groups", "dense"),
    *("thresholds", "guided", "guide_thresholds", "bias", "positive_weights"),
)
OFTEN_ZERO = ("margin", "hardness")  # which saves the work that they would be
FLAGS = ("symmetric", "normalise")

_functions = {}  # what is compiled -> the function, or None where it does not compile
_told = set()


def attempt(step, tile, block, given=(), out=None):
    """The result of step(tile, block, given), compiled; None where that is not to be, or fails.

    The panel keeps its scores. out: where what the step makes of them goes, which may be the panel.
    """
    if not _wanted(block):
        return None
    key = _key(step, tile, block, given, out)
    first = key not in _functions
    if first:
        _functions[key] = _compile(step, tile, block, out)
    function = _functions[key]
    if function is None:
        return None
    arguments = _arguments(tile, block, given, out)
    # Whether autograd records is a part of what a compilation depends on.
    with torch.no_grad():
        call = _first_call if first else _later_call
        return call(key, function, arguments, block)


def _later_call(key, function, arguments, block):
    """A call that compiles only where a setting of torch, or a layout of memory, is a new one.

    Such a compilation may take sizes that happen to be equal for equal, and is then done once more
    for others: to patch the compiler's setting at every call would take tens of microseconds.
    """
    try:
        return function(*arguments)
    except Exception as error:
        compiler = torch._dynamo.exc
        if not isinstance(error, (compiler.TorchDynamoException, compiler.FailOnRecompileLimitHit)):
            raise
        # Too many of these, which is known before anything has run.
        _functions[key] = None
        _tell(block.panel.device, error)
        return None


def _first_call(key, function, arguments, block):
    """The call that compiles, with what it takes to go on if that fails; None then."""
    from torch.fx.experimental import _config

    scores = block.panel.clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own code
            # Else sizes that happen to be equal would have to be equal ever after.
            with _config.patch(use_duck_shape=False):
                return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise
        _functions[key] = None
        block.panel.copy_(scores)
        _tell(block.panel.device, error)
        return None


def _tell(device, error):
    if device not in _told:
        _told.add(device)
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"the torch backend runs uncompiled on {device}, since torch.compile failed there"
            f" ({type(error).__name__}: {reason}); {VARIABLE}=0 does not try",
            stacklevel=2,
        )


# ---- where ----


def wanted(device, scores):
    """Whether panels of so many scores go through torch.compile on a device."""
    asked = os.environ.get(VARIABLE) or "auto"
    if asked not in ("auto", "0", "1"):
        raise ValueError(f"{VARIABLE}: wanted 0, 1 or auto, got {asked!r}")
    if asked == "1":
        return device.type in ("cpu", *DEVICES)
    large = device.type in DEVICES and scores > panels.small_scores(device)
    return asked == "auto" and large and installed.FOUND


def _wanted(block):
    panel = block.panel
    # A size of 1 would be compiled as that very size.
    if min(panel.shape) < 2 or not wanted(panel.device, panel.numel()):
        return False
    return not (_capturing(panel) or traced())


def _capturing(panel):
    """Whether a CUDA graph is being recorded, during which nothing can be compiled."""
    return panel.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- what ----


def _key(step, tile, block, given, out):
    """All that the function depends on but for sizes and numbers."""
    tensors = *(getattr(block, name) for name in TENSORS), *given
    return (
        step,
        tile.kind,
        *(getattr(tile, name) for name in FLAGS),
        *(getattr(tile, name) == 0 for name in OFTEN_ZERO),
        None if tile.levels is None else len(tile.levels),
        *(block.whole, block.skip, block.exclude_above is None, block.negative_target),
        *(block.panel.device, block.panel.dtype, out is None or out is block.panel or out.dtype),
        *(None if tensor is None else (tensor.dtype, tensor.ndim) for tensor in tensors),
    )


def _arguments(tile, block, given, out):
    panel = block.panel
    number = functools.partial(_number, dtype=panel.dtype, device=panel.device)
    return (
        panel,
        None if out is panel else out,
        None if block.skip == "nothing" else number(block.first, dtype=torch.int64),
        None if block.exclude_above is None else number(block.exclude_above),
        tile.levels,
        *(number(getattr(tile, name)) for name in tile.record.parameters),
        *(_unrelated(getattr(block, name)) for name in TENSORS),
        *given,
    )


def _unrelated(tensor):
    """The tensor as no view: torch.compile would ask whether two views are of one tensor."""
    return None if tensor is None else tensor.data


def _number(value, dtype, device):
    """A number or 0-d tensor as a 0-d tensor on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _compile(step, tile, block, out):
    """The step as a function of `_arguments`."""
    kind, writes = tile.kind, out is not None
    zero = {name: 0.0 for name in OFTEN_ZERO if getattr(tile, name) == 0}
    flags = {name: getattr(tile, name) for name in FLAGS}
    whole, skip, negative_target = block.whole, block.skip, block.negative_target
    parameters = tile.record.parameters

    def function(panel, out, first, exclude_above, levels, *tensors):
        numbers = dict(zip(parameters, tensors[: len(parameters)], strict=True)) | zero
        tensors = tensors[len(parameters) :]
        given = tensors[len(TENSORS) :]
        parts = dict(zip(TENSORS, tensors[: len(TENSORS)], strict=True))
        block = FusibleBlock(
            panel.clone(),  # so that the scores are kept, or written over at the very end
            **parts,
            first=first,
            whole=whole,
            skip=skip,
            exclude_above=exclude_above,
            negative_target=negative_target,
        )
        tile = Tile(kind, None, levels=levels, **numbers, **flags)
        result = step(tile, block, given)
        if writes:
            (panel if out is None else out).copy_(block.panel)
        return result

    # torch.compile counts what it has compiled by code object, and gives up after a few.
    own = function.__code__.replace(co_name=f"{step.__name__.strip('_')}_of_{kind}")
    made = types.FunctionType(own, globals(), None, None, function.__closure__)
    return torch.compile(
        made, dynamic=True, fullgraph=True, backend=COMPILER, options=_options(COMPILER)
    )


def _options(compiler):
    """Those by which another process writes the same code; None where there are none.

    Else the compiler takes the fastest of several ways to add up, as it has timed them.
    """
    if compiler != "inductor":
        return None
    import torch._inductor.config as config

    return {"deterministic": True} if hasattr(config, "deterministic") else None
