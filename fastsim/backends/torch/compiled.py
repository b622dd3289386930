"""The steps between the products, through torch.compile.

A compiled step reads or writes the panel a few times, single operations ten times. Steps are
compiled on GPUs with Triton, for panels large enough to repay the seconds of a compilation.
FASTSIM_COMPILE=0 turns this off; FASTSIM_COMPILE=1 compiles for every panel, on a CPU too. A step
that does not compile runs as single operations from then on, with one warning.

One compilation serves every shape and every number: sizes are symbols, numbers are tensors.
"""

import functools
import types
import warnings

import torch

from fastsim.backends.torch import panels
from fastsim.backends.torch.block import FusibleBlock
from fastsim.backends.triton import installed
from fastsim.environment import Variable
from fastsim.operators import traced
from fastsim.tile_loss import TileLoss

VARIABLE = "FASTSIM_COMPILE"
_variable = Variable(VARIABLE)
DEVICES = ("cuda", "xpu")
COMPILER = "inductor"

# The fields of a block that are arguments of the compiled function.
TENSORS = (
    *("positives", "row_ids", "column_ids", "row_groups", "column_groups", "dense"),
    *("thresholds", "guided", "guide_thresholds", "bias", "positive_weights"),
)
# What it is compiled for: whether these numbers of a tile are 0, which saves work, and its flags.
OFTEN_ZERO = ("margin", "hardness")
FLAGS = ("symmetric", "normalise")

_functions = {}  # `_key` -> the compiled function, or None if it does not compile
_told = set()  # the devices that have been warned about


def attempt(step, tile, block, inputs=(), out=None):
    """The result of step(tile, block, inputs), compiled; None if it is not compiled or fails.

    out: receives the panel as the step leaves it; may be the panel itself. Otherwise, and if it
        fails, the panel keeps its scores.
    """
    if not _compiles(block):
        return None
    key = _key(step, tile, block, inputs, out)
    first = key not in _functions
    if first:
        _functions[key] = _compile(step, tile, block, out)
    function = _functions[key]
    if function is None:
        return None
    arguments = _arguments(tile, block, inputs, out)
    # A compilation depends on whether autograd records.
    with torch.no_grad():
        call = _first_call if first else _later_call
        return call(key, function, arguments, block)


def _later_call(key, function, arguments, block):
    """A call that compiles again only if a setting of torch or a layout of memory is new.

    Such a compilation may assume that sizes which happen to be equal always are, and is then done
    once more for others: to patch the compiler's setting takes tens of microseconds a call.
    """
    try:
        return function(*arguments)
    except Exception as error:
        compiler = torch._dynamo.exc
        if not isinstance(error, (compiler.TorchDynamoException, compiler.FailOnRecompileLimitHit)):
            raise
        # Too many compilations; this is raised before anything has run.
        _functions[key] = None
        _warn_once(block.panel.device, error)
        return None


def _first_call(key, function, arguments, block):
    """The call that compiles. If that fails, it restores the scores and returns None."""
    from torch.fx.experimental import _config

    scores = block.panel.clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the compiler's own code
            # Otherwise sizes that happen to be equal now would have to be equal in every call.
            with _config.patch(use_duck_shape=False):
                return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise
        _functions[key] = None
        block.panel.copy_(scores)
        _warn_once(block.panel.device, error)
        return None


def _warn_once(device, error):
    if device not in _told:
        _told.add(device)
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"the torch backend runs uncompiled on {device}, since torch.compile failed there"
            f" ({type(error).__name__}: {reason}); {VARIABLE}=0 does not try",
            stacklevel=2,
        )


# ---- when a step is compiled ----


def wanted(device, scores):
    """Whether steps on panels of this many scores are compiled on a device."""
    setting = _variable.value() or "auto"
    if setting not in ("auto", "0", "1"):
        raise ValueError(f"{VARIABLE}: wanted 0, 1 or auto, got {setting!r}")
    if setting == "1":
        return device.type in ("cpu", *DEVICES)
    large = device.type in DEVICES and scores > panels.small_scores(device)
    return setting == "auto" and large and installed.FOUND


def _compiles(block):
    panel = block.panel
    # torch.compile treats a size of 1 as a constant.
    if min(panel.shape) < 2 or not wanted(panel.device, panel.numel()):
        return False
    return not (_capturing(panel) or traced())


def _capturing(panel):
    """Whether a CUDA graph is being recorded; nothing can be compiled meanwhile."""
    return panel.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- what is compiled ----


def _key(step, tile, block, inputs, out):
    """Everything that the compiled function depends on, except sizes and numbers."""
    tensors = *(getattr(block, name) for name in TENSORS), *inputs
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


def _arguments(tile, block, inputs, out):
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
        *inputs,
    )


def _unrelated(tensor):
    """The tensor, not as a view: torch.compile checks whether two views share one tensor."""
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
        inputs = tensors[len(TENSORS) :]
        parts = dict(zip(TENSORS, tensors[: len(TENSORS)], strict=True))
        block = FusibleBlock(
            panel.clone(),  # so that the scores stay, or are overwritten only at the end
            **parts,
            first=first,
            whole=whole,
            skip=skip,
            exclude_above=exclude_above,
            negative_target=negative_target,
        )
        tile = TileLoss(kind, None, levels=levels, **numbers, **flags)
        result = step(tile, block, inputs)
        if writes:
            (panel if out is None else out).copy_(block.panel)
        return result

    # torch.compile counts compilations by code object, and gives up after a few: each has its own.
    code = function.__code__.replace(co_name=f"{step.__name__.strip('_')}_of_{kind}")
    renamed = types.FunctionType(code, globals(), None, None, function.__closure__)
    return torch.compile(
        renamed, dynamic=True, fullgraph=True, backend=COMPILER, options=_options(COMPILER)
    )


def _options(compiler):
    """The options that make every process generate the same code; None if there are none.

    Without them the compiler times several ways to add up, and takes the fastest.
    """
    if compiler != "inductor":
        return None
    import torch._inductor.config as config

    return {"deterministic": True} if hasattr(config, "deterministic") else None
