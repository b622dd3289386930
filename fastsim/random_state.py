"""The states of torch's default random generators, on the CPU and on an accelerator in use."""

import torch


def random_state():
    """{device type: state of its default generators}, for the CPU and an accelerator in use."""
    return {kind: _access(kind)[0]() for kind in ("cpu", *_accelerator())}


def set_random_state(states):
    """Sets the default generators back to what `random_state` returned."""
    for kind, state in states.items():
        _access(kind)[1](state)


def can_be_set_back(kind):
    """Whether torch can read and set the default generators of a device type."""
    return _access(kind) is not None


def _accelerator():
    """[device type] of the accelerator, [] if it is not in use or its state cannot be set back."""
    device = torch.accelerator.current_accelerator()
    if device is None or not can_be_set_back(device.type):
        return []
    # Reading the state of a device that is not in use would initialise it.
    initialised = getattr(torch.get_device_module(device), "is_initialized", None)
    return [device.type] if initialised is None or initialised() else []


def _access(kind):
    """The functions [get, set] of the state of a device type's default generators, or None."""
    module = torch if kind == "cpu" else getattr(torch, kind, None)
    for name in ("rng_state_all", "rng_state"):  # of all devices, or of the only one
        functions = [getattr(module, f"{verb}_{name}", None) for verb in ("get", "set")]
        if all(functions):
            return functions
    return None
