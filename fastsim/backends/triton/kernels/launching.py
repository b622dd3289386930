"""One way to launch a kernel, for the backend, its tests and the compile report."""

import torch


def run(kernel, grid, arguments, constants):
    """Runs the kernel; the compile report replaces this by a compilation."""
    kernel[grid](*arguments, **constants)


def launch(kernel, grid, device, *arguments, **constants):
    """Runs the kernel on a device."""
    # Epilogues write tl.fma where a product and a sum have to be rounded once. No other product and
    # sum may be fused.
    constants["enable_fp_fusion"] = False
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(kernel, grid, arguments, constants)
    else:
        run(kernel, grid, arguments, constants)


def cdiv(a, b):
    """a / b rounded up."""
    return -(-a // b)
